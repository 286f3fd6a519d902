"""What code for sm_90 takes of a multiprocessor, on a machine that need not have one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPORT = """
import subprocess
from triton import knobs

with open("code.cubin", "wb") as file:
    file.write(code.asm["cubin"])
print("shared", code.metadata.shared)
command = [knobs.nvidia.cuobjdump.path, "-res-usage", "code.cubin"]
print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
"""


def resources_of(script: str, *arguments: object, folder: Path) -> tuple[int, str]:
    """Shared memory in bytes, and cuobjdump's line with registers, stack and local memory. script:
    Python that leaves what triton.compile gives in `code`; folder: where it may write.

    In a process of its own: Triton's interpreter, which tests here run in, compiles nothing.
    """
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script + REPORT, *map(str, arguments)],
        env=environment, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shared, usage = (
        next(line for line in done.stdout.splitlines() if word in line)
        for word in ("shared ", "REG:")
    )
    return int(shared.split()[1]), usage
