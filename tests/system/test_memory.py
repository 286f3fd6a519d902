"""Loading needs no second model: peak memory on a synthetic 1 GB checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pico_vllm.config.model import ModelConfig
from pico_vllm.models.llama import parameter_shapes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROGRAM = """
import json, sys
import torch
def memory(name):
    lines = open("/proc/self/status").readlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
before = memory("VmRSS")
from pico_vllm.config.engine import EngineConfig
from pico_vllm.config.model import ModelConfig
from pico_vllm.engine.loading import load_weights
from pico_vllm.models.hub import read_hf_config
from pico_vllm.models.weights import SafetensorsSource
from pathlib import Path
directory, weight_format = Path(sys.argv[1]), sys.argv[2]
model_config = ModelConfig.from_hf(*read_hf_config(directory))
config = EngineConfig(model=str(directory), dtype="bfloat16", weight_format=weight_format)
config = config.resolve(model_config, device="cpu", has_fast_bf16=True, num_threads=2)
model = load_weights(model_config, config, SafetensorsSource(directory), torch.device("cpu"))
# Not ru_maxrss: a child begins with that of the process it was forked from.
print(json.dumps({"peak": memory("VmHWM") - before, "rest": memory("VmRSS") - before}))
"""
SLACK_BYTES = 64 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    directory = tmp_path_factory.mktemp("gigabyte")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    shapes = parameter_shapes(ModelConfig.from_hf(CONFIG))
    tensors = {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory, sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(("weight_format", "bytes_per_element"), [("keep", 2), ("fp32", 4)])
def test_loading_takes_little_more_than_the_weights(
    checkpoint: tuple[Path, int], weight_format: str, bytes_per_element: int
) -> None:
    """Peak memory above that after `import torch` is at most 1.3 times the weights + 64 MiB, and
    what stays is one copy of them."""
    directory, file_bytes = checkpoint
    assert 0.9e9 < file_bytes < 1.2e9
    weight_bytes = file_bytes // 2 * bytes_per_element
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), weight_format],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["rest"] >= 0.9 * weight_bytes, measured
    assert measured["peak"] <= 1.3 * weight_bytes + SLACK_BYTES, (measured, weight_bytes)
    assert measured["rest"] <= 1.1 * weight_bytes + SLACK_BYTES, (measured, weight_bytes)
