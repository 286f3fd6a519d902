"""Reading files straight to a device, on a CPU that plays the device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pico_vllm.errors import ModelLoadError
from pico_vllm.models import device_reader, gguf, weights
from pico_vllm.models.device_reader import DeviceReader
from pico_vllm.models.gguf import GGUFSource
from pico_vllm.models.raw_file import RawFile
from pico_vllm.models.weights import SafetensorsSource

CPU = torch.device("cpu")


class SlowLink:
    """Copies behind the caller's back, as a device does, and only when it must or after a while."""

    def __init__(self, delay_s: float = 0.002) -> None:
        self._delay_s = delay_s
        self._under_way: list[threading.Thread] = []
        self.num_begun = self.num_ended = 0
        self.buffers: list[Tensor] = []

    def buffer(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def begin(self) -> None:
        self.num_begun += 1

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        def run() -> None:
            time.sleep(self._delay_s)
            target.copy_(source)

        thread = threading.Thread(target=run)
        thread.start()
        self._under_way.append(thread)
        return thread.join

    def end(self) -> None:
        # A CUDA stream orders what follows; a CPU that plays one has to wait.
        self.num_ended += 1
        for thread in self._under_way:
            thread.join()
        self._under_way.clear()


def make_reader(link: SlowLink) -> DeviceReader:
    return DeviceReader(CPU, num_buffers=3, buffer_bytes=64, min_piece_bytes=16, link=link)


@pytest.fixture
def link() -> SlowLink:
    return SlowLink()


@pytest.fixture
def reader(link: SlowLink) -> Iterator[DeviceReader]:
    made = make_reader(link)
    yield made
    made.close()


@pytest.fixture
def numbers(tmp_path: Path) -> tuple[RawFile, Tensor]:
    """A file of 1,000 fp32 numbers, after 12 bytes of something else."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "numbers"
    path.write_bytes(b"x" * 12 + values.numpy().tobytes())
    return RawFile(path), values


@pytest.mark.parametrize("count", [1, 4, 12, 16, 17, 48, 49, 1000])
def test_every_byte_arrives_in_its_place(
    reader: DeviceReader, link: SlowLink, numbers: tuple[RawFile, Tensor], count: int
) -> None:
    """Less than a piece, whole rings and more: buffers are not filled before their copy ended."""
    file, values = numbers
    for _ in range(3):  # the ring goes on where it stopped
        out = torch.full((count,), torch.nan)
        reader.read_into(file, 12, out, torch.float32)
        assert torch.equal(out, values[:count])
    assert link.num_begun == link.num_ended == 3
    assert sum(len(buffer) for buffer in link.buffers) == 3 * 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_converted_on_the_device(
    reader: DeviceReader,
    numbers: tuple[RawFile, Tensor],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch converts, span by span."""
    monkeypatch.setattr(device_reader, "STAGE_BYTES", 200)
    file, values = numbers
    out = torch.full((100, 10), torch.nan, dtype=dtype)
    reader.read_into(file, 12, out, torch.float32)
    assert torch.equal(out, values.view(100, 10).to(dtype))


def test_destinations_with_strides(reader: DeviceReader, numbers: tuple[RawFile, Tensor]) -> None:
    """A transposed view is filled, and nothing beside a slice of rows."""
    file, values = numbers
    base = torch.zeros(10, 100)
    reader.read_into(file, 12, base.T, torch.float32)
    assert torch.equal(base.T, values.view(100, 10))
    rows = torch.zeros(12, 10)
    reader.read_into(file, 12, rows[1:11], torch.float32)
    assert torch.equal(rows[1:11], values[:100].view(10, 10))
    assert not rows[0].any() and not rows[11].any()


def test_a_short_file_raises_and_the_reader_goes_on(
    reader: DeviceReader, link: SlowLink, numbers: tuple[RawFile, Tensor]
) -> None:
    """The error of the thread is the caller's; the next read is whole."""
    file, values = numbers
    os.truncate(file.path, 12 + 4 * 500)
    with pytest.raises(ModelLoadError, match=r"ends at byte 2012, expected \d+: it was cut"):
        reader.read_into(file, 12, torch.zeros(1000), torch.float32)
    assert link.num_begun == link.num_ended == 1
    out = torch.zeros(500)
    reader.read_into(file, 12, out, torch.float32)
    assert torch.equal(out, values[:500])


def test_nobody_writes_to_the_ring_after_an_error(link: SlowLink, tmp_path: Path) -> None:
    """One thread fails while others read: the caller hears of it when they are done."""
    reader = make_reader(link)
    is_done = []

    class File(RawFile):
        def read_into(self, offset: int, view: memoryview) -> None:
            if offset == 16:
                raise ModelLoadError("reading it: Input/output error")
            time.sleep(0.05)
            view[:] = b"y" * len(view)
            is_done.append(offset)

    (tmp_path / "file").write_bytes(b"z" * 48)
    with pytest.raises(ModelLoadError, match="Input/output error"):
        reader.read_into(
            File(tmp_path / "file"), 0, torch.zeros(48, dtype=torch.uint8), torch.uint8
        )
    assert sorted(is_done) == [0, 32]
    reader.close()


def test_closing_ends_the_threads(link: SlowLink, numbers: tuple[RawFile, Tensor]) -> None:
    """No thread of the reader is left."""
    reader = make_reader(link)
    reader.read_into(numbers[0], 12, torch.zeros(1000), torch.float32)
    assert any(thread.name.startswith("weights") for thread in threading.enumerate())
    reader.close()
    assert not any(thread.name.startswith("weights") for thread in threading.enumerate())


@pytest.fixture
def cpu_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources read to the CPU as they read to a GPU."""
    for module in (weights, gguf):
        monkeypatch.setattr(module, "has_own_memory", lambda device: True)
        monkeypatch.setattr(module, "DeviceReader", lambda device: make_reader(SlowLink(0.0)))


@pytest.mark.usefixtures("cpu_as_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_read_straight_give_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whole, by rows, and a tensor without dimensions."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(50, 8, generator=generator),
        "half": torch.randn(30, 8, generator=generator).to(torch.bfloat16),
        "number": torch.tensor(3.25),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for name, tensor in tensors.items():
        out = torch.full(tensor.shape, torch.nan, dtype=dtype)
        source.read_into(name, out)
        assert torch.equal(out, tensor.to(dtype)), name
    part = torch.full((3, 8), torch.nan, dtype=dtype)
    source.read_into("matrix", part, slice(2, 5))
    assert torch.equal(part, tensors["matrix"][2:5].to(dtype))
    source.close()


@pytest.mark.usefixtures("cpu_as_device")
@pytest.mark.parametrize(
    ("arch", "storage"), [("llama", "f16"), ("qwen2", "bf16"), ("qwen2", "q8_0")]
)
def test_gguf_read_straight_gives_the_same(tmp_path: Path, arch: str, storage: str) -> None:
    """Plain tensors; those whose rows llama.cpp reordered and packed ones take the other way."""
    # Late: the GPU's test is also run where the package gguf is not.
    import tiny_gguf

    stored = tiny_gguf.write_gguf(tmp_path / "m.gguf", arch, tied=False, storage=storage)
    source = GGUFSource(tmp_path / "m.gguf")
    for name, expected in stored.items():
        out = torch.full(expected.shape, torch.nan)
        source.read_into(name, out)
        assert torch.equal(out, torch.from_numpy(expected)), name
    part = torch.full((7, tiny_gguf.HIDDEN), torch.nan)
    source.read_into("lm_head.weight", part, slice(3, 10))
    assert torch.equal(part, torch.from_numpy(stored["lm_head.weight"][3:10]))
    source.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gets_what_the_file_holds(tmp_path: Path, dtype: torch.dtype) -> None:
    """More than the ring holds, with work of the current stream before and after each tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"matrix{i}": torch.randn(5000, 1000, generator=generator).to(torch.bfloat16)
        for i in range(12)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for tensor in tensors.values():
        out = torch.full(tensor.shape, torch.nan, dtype=dtype, device="cuda")
        name = next(name for name, other in tensors.items() if other is tensor)
        source.read_into(name, out)
        doubled = out * 2  # on the current stream, without a wait of the host
        del out  # its memory may be the next one's
        assert torch.equal(doubled.cpu(), tensor.to(dtype) * 2), name
    source.close()
