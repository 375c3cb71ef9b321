"""Fetching and converting a model from a wheel (a tiny one), and the default model itself."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prefixkv.errors import ModelError
from prefixkv.model.default_model import WheelModel, cache_directory, wheel_model_directory
from prefixkv.model.loader import LoadedModel, load_model
from test_model import greedy, logits_of, reference_logits
from tiny_model import write_tiny_gguf, write_tiny_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the whole package index, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PREFIXKV_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def model(index: Path, tmp_path: Path) -> WheelModel:
    """A tiny model in a wheel of that index."""
    directory = write_tiny_model(tmp_path / "tiny")
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", directory, pre="smollm")
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    data = wheel.read_bytes()
    return WheelModel(
        name="Tiny",
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def test_the_wheel_becomes_a_directory_with_the_same_model(
    model: WheelModel, tmp_path: Path
) -> None:
    directory = wheel_model_directory(model)
    converted = load_file(directory / "model.safetensors")
    original = load_file(tmp_path / "tiny" / "model.safetensors")
    assert converted.keys() == original.keys()
    assert all(torch.equal(converted[name], original[name]) for name in original)
    one, other = load_model(directory), load_model(tmp_path / "tiny.gguf")
    text = "digits 1234 <|im_end|>"
    assert one.config.num_layers == other.config.num_layers == 2
    assert one.tokenizer.encode(text) == other.tokenizer.encode(text)
    assert one.tokenizer.eos_token_ids == other.tokenizer.eos_token_ids
    assert one.tokenizer.render_chat(QUESTION) == other.tokenizer.render_chat(QUESTION)


def test_nothing_but_the_directory_and_its_lock_is_kept(model: WheelModel) -> None:
    directory = wheel_model_directory(model)
    assert {p.name for p in cache_directory().iterdir()} == {
        directory.name,
        f"{directory.name}.lock",
    }


def test_progress_tells_of_fetching_and_converting(model: WheelModel) -> None:
    seen: list[tuple[str, int, int]] = []
    wheel_model_directory(model, lambda *step: seen.append(step))
    assert ("fetch", model.num_bytes, model.num_bytes) in seen
    done, total = seen[-1][1:]
    assert seen[-1][0] == "convert"
    assert done == total > 10


def test_a_second_start_fetches_nothing(model: WheelModel, index: Path) -> None:
    first = wheel_model_directory(model)
    next(index.iterdir()).unlink()
    assert wheel_model_directory(model) == first


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", "cut short"),
        ("model.safetensors", "changed"),
        ("tokenizer.json", "removed"),
        ("manifest.json", "changed"),
    ],
)
def test_a_damaged_cache_is_built_again(model: WheelModel, file: str, damage: str) -> None:
    path = wheel_model_directory(model) / file
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(data[:-9])
    else:
        path.write_bytes(data[:-9] + bytes(byte ^ 1 for byte in data[-9:]))
    wheel_model_directory(model)
    assert path.read_bytes() == data


def test_a_damaged_cache_without_an_index_is_reported(model: WheelModel, index: Path) -> None:
    directory = wheel_model_directory(model)
    next(index.iterdir()).unlink()
    (directory / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=f"{re.escape(str(directory))} is damaged"):
        wheel_model_directory(model)


def test_what_a_killed_process_left_is_cleared(model: WheelModel) -> None:
    leftover = cache_directory() / f".{model.directory}.abc"
    (leftover / "model").mkdir(parents=True)
    directory = wheel_model_directory(model)
    assert not leftover.exists()
    assert directory.is_dir()


def test_of_two_at_once_one_fetches(model: WheelModel) -> None:
    stages: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(
                wheel_model_directory,
                model,
                lambda stage, done, total: stages.append(stage) if done == total else None,
            )
            for _ in range(2)
        ]
    assert futures[0].result() == futures[1].result()
    assert stages.count("convert") == 1


def test_another_file_under_the_same_name_is_refused(model: WheelModel, index: Path) -> None:
    with zipfile.ZipFile(next(index.iterdir()), "a") as archive:
        archive.writestr("tiny_model/more.txt", "more")
    with pytest.raises(ModelError, match=f"expected {model.sha256}"):
        wheel_model_directory(model)
    assert not (cache_directory() / model.directory).exists()


def test_a_failed_fetch_says_what_to_do(index: Path) -> None:
    absent = WheelModel("Absent", "absent-model==1.0", "x", 1, "0" * 64)
    with pytest.raises(ModelError) as error:
        wheel_model_directory(absent)
    message = str(error.value)
    for named in ("absent-model==1.0", str(sys.executable), "--model", "PREFIXKV_CACHE_DIR"):
        assert named in message
    assert list(index.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    monkeypatch.setenv("PREFIXKV_CACHE_DIR", str(file))
    with pytest.raises(ModelError, match=re.escape(str(file))):
        wheel_model_directory()


def test_the_cache_follows_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXKV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/prefixkv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "prefixkv"
    monkeypatch.setenv("PREFIXKV_CACHE_DIR", "/elsewhere")
    assert cache_directory() == Path("/elsewhere")


# --- The default model ---


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    return load_model(dtype="float32")


@pytest.mark.model
@pytest.mark.parametrize(
    "text", ["The year 2026, 3.14159", "naïve 日本語 🙂", "  def f(x):\n\treturn  x\n"]
)
def test_default_tokenizer_gives_text_back(smollm: LoadedModel, text: str) -> None:
    assert smollm.tokenizer.decode(smollm.tokenizer.encode(text)) == text


@pytest.mark.model
def test_default_tokenizer_splits_digits(smollm: LoadedModel) -> None:
    tokens = [smollm.tokenizer.token(i) for i in smollm.tokenizer.encode("in 2026")]
    assert tokens == ["in", "Ġ", "2", "0", "2", "6"]


@pytest.mark.model
def test_default_chat_template_brings_its_system_prompt(smollm: LoadedModel) -> None:
    assert smollm.tokenizer.render_chat(QUESTION) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_default_model_ends_its_turn(smollm: LoadedModel) -> None:
    prompt = smollm.tokenizer.apply_chat_template(QUESTION)
    answer = greedy(smollm, prompt, 40)
    assert "Paris" in smollm.tokenizer.decode(answer)
    assert smollm.tokenizer.token(answer[-1]) == "<|im_end|>"


@pytest.mark.model
def test_default_logits_equal_those_of_transformers(smollm: LoadedModel) -> None:
    text = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
    tokens = smollm.tokenizer.encode(text)[:512]
    expected = reference_logits(wheel_model_directory(), tokens)
    found = logits_of(smollm, tokens)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.model
def test_loading_the_default_model_takes_little_more_memory_than_its_weights() -> None:
    # Not ru_maxrss: it begins with the memory of the process that forked.
    program = (
        "import json, pathlib\n"
        "from prefixkv.model import loader\n"
        "def peak():\n"
        "    status = pathlib.Path('/proc/self/status').read_text()\n"
        "    return int(status.split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "loaded = loader.load_model(dtype='float32')\n"
        "print(json.dumps([before, peak()]))\n"
    )
    directory = wheel_model_directory()
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    before, after = (1024 * n for n in json.loads(output.stdout))
    weights = (directory / "model.safetensors").stat().st_size
    assert weights < after - before < 1.35 * weights
