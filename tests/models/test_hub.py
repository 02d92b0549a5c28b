"""Models of the hub: which files a name means, downloads from a hub on this machine, its cache, what goes wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeinfer.errors import UserError
from pipeinfer.job.placement.checks import fetch_files
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.hub import cached_models, choose_files, fetch, name_of, parse_name, quant_of
from tests.support.gguf_factory import Shape, write_model
from tests.support.hub_server import TOKEN, HubServer, serving
from tests.support.jobs import COMMAND, environment, finish

constants = pytest.importorskip("huggingface_hub.constants", reason="models of the hub need huggingface_hub")

FILES = dict.fromkeys(
    [
        "README.md",
        "mmproj-F16.gguf",
        "imatrix.gguf",
        "m-IQ2_M.gguf",
        "m-Q8_0.gguf",
        "m.q6_k.gguf",
        "BF16/m-BF16-00001-of-00002.gguf",
        "BF16/m-BF16-00002-of-00002.gguf",
        "UD/m-UD-Q4_K_XL.gguf",
    ],
    2_000_000,
)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("u/m", ["m-Q8_0.gguf"]),
        ("u/m:q8_0", ["m-Q8_0.gguf"]),
        ("u/m:Q6_K", ["m.q6_k.gguf"]),
        ("u/m:bf16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        ("u/m:UD-Q4_K_XL", ["UD/m-UD-Q4_K_XL.gguf"]),
        ("u/m:m-IQ2_M.gguf", ["m-IQ2_M.gguf"]),
        ("u/m:mmproj-F16.gguf", ["mmproj-F16.gguf"]),
    ],
)
def test_which_files_a_name_means(name: str, files: list[str]) -> None:
    assert choose_files(parse_name(name), FILES) == files


def test_the_usual_quantisation_comes_first_and_else_the_first_file() -> None:
    assert choose_files(parse_name("u/m"), FILES | {"x/m-Q4_K_M.gguf": 1}) == ["x/m-Q4_K_M.gguf"]
    others = {file: size for file, size in FILES.items() if "Q8_0" not in file and "BF16" not in file}
    assert choose_files(parse_name("u/m"), others) == ["UD/m-UD-Q4_K_XL.gguf"]
    assert [quant_of(file) for file in ("m.q6_k.gguf", "BF16/m-BF16-00001-of-00002.gguf", "m.gguf")] == [
        "Q6_K",
        "BF16",
        "",
    ]


def test_what_a_name_does_not_mean() -> None:
    with pytest.raises(UserError, match=r"u/m has no Q5_K; there are BF16 .4.0 MB., Q4_K_XL .2.0 MB., .*Q6_K"):
        choose_files(parse_name("u/m:Q5_K"), FILES)
    with pytest.raises(UserError, match=r"u/m has no GGUF file of a model; look for"):
        choose_files(parse_name("u/m"), {"mmproj-F16.gguf": 1})
    with pytest.raises(UserError, match=r"of 2 parts of m-00001-of-00002.gguf u/m has 1"):
        choose_files(parse_name("u/m"), {"m-00001-of-00002.gguf": 1})
    unheard = ("a/..", "../m", "-u/m", "u/m-", ".u/m", "u/m--x", "u..x/m", "u/m.git", "u/" + 97 * "m")
    for bad in ("m", "u/m/x", "u/m:", "/m", "u /m", "", *unheard):
        with pytest.raises(UserError, match=r"is no model on the hub; write USER/MODEL"):
            parse_name(bad)
    for good in ("u/m", "u-1/m.gguf", "_u/m_", "u/m-1.5-GGUF", "u/m.git.x"):
        assert parse_name(good).repo == good
    assert name_of(Path("u/m.gguf")) is None and str(parse_name("u/m:Q8_0").path) == "hf:u/m:Q8_0"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """With an empty cache; the model u/m has two files."""
    folder = tmp_path / "hub" / "u" / "m"
    folder.mkdir(parents=True)
    shutil.copy(DRAFT, folder / "m-Q8_0.gguf")
    (folder / "m-Q2_K.gguf").write_bytes(b"GGUF")
    with serving(tmp_path / "hub") as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def get(name: str, offline: bool = False) -> tuple[Path, list[str]]:
    notices: list[str] = []
    return fetch(parse_name(name), offline, notices.append), notices


def test_a_file_is_downloaded_once_and_needs_no_network_then(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path, (notice,) = get("u/m")
    assert path.read_bytes() == DRAFT.read_bytes() and path.name == "m-Q8_0.gguf"
    assert notice.startswith("downloading u/m: m-Q8_0.gguf (1.0 MB), into ")
    n_downloads = len(hub.downloads)
    assert get("u/m") == (path, []) and get("u/m:Q8_0", offline=True) == (path, [])
    assert len(hub.downloads) == n_downloads
    with pytest.raises(UserError, match=r"--offline.; in its cache u/m has no Q2_K; there are Q8_0"):
        get("u/m:Q2_K", offline=True)
    with pytest.raises(UserError, match=r"u/x is not in .*--offline.; download it once where the hub can be asked"):
        get("u/x", offline=True)
    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"not asked .HF_HUB_OFFLINE.; download it"):
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        get("u/x")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    same, (notice,) = get("u/m")
    assert same == path and "127.0.0.1:1 cannot be reached" in notice and "cache has is used" in notice
    with pytest.raises(UserError, match=r"u/other is not in the hub's cache .*, and http://127.0.0.1:1 cannot be"):
        get("u/other")
    (found,) = cached_models()
    assert (found.repo, found.quant, found.path, found.is_whole) == ("u/m", "Q8_0", path, True)


def test_all_parts_of_a_split_model_come(hub: HubServer) -> None:
    folder = hub.root / "u" / "split"
    folder.mkdir()
    write_model(folder / "m-Q8_0.gguf", Shape(n_layer=2), part_tensors=10)
    path, _ = get("u/split")
    assert path.name == "m-Q8_0-00001-of-00003.gguf" and read_model_info(path).n_layer == 2
    (found,) = cached_models()
    assert found.path == path and found.is_whole and found.n_bytes == read_model_info(path).n_bytes
    path.with_name("m-Q8_0-00002-of-00003.gguf").unlink()
    assert [model.is_whole for model in cached_models()] == [False]


def test_a_broken_download_goes_on_where_it_broke(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    (hub.root / "u" / "m" / ".broken").touch()
    path, _ = get("u/m")
    assert path.read_bytes() == DRAFT.read_bytes()
    assert [" bytes=" in request for request in hub.downloads] == [False, True]


def test_what_the_hub_refuses(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no model u/other; check the name, or if it is private give the token"):
        get("u/other")
    with pytest.raises(UserError, match=r"u/m has no Q5_K_M; there are Q2_K .4 B., Q8_0 .1.0 MB.$"):
        get("u/m:Q5_K_M")
    (hub.root / "u" / "m" / ".gated").touch()
    with pytest.raises(UserError, match=r"u/m is gated: ask for access at http://127.0.0.1:\d+/u/m; give the token"):
        get("u/m")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert get("u/m")[0].exists()
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"the hub's cache .*file cannot be written: Not a directory; make room"):
        get("u/m")


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'pipeinfer\[hub\]'"):
        fetch_files([Path("hf:u/m")])
    assert fetch_files([Path("m.gguf")]) == [Path("m.gguf")]


def test_a_job_runs_on_models_of_the_hub(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub.root / "big" / "t").mkdir(parents=True)
    shutil.copy(TARGET, hub.root / "big" / "t" / "t.gguf")
    (hub.root / "big" / "t" / ".gated").touch()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    common = ["-p", "def f(x):", "-n", "8", "--temp", "0", "-t", "1", "--json"]
    done = finish(2, ["run", "-hf", "big/t", "-hft", TOKEN, "-hfd", "u/m:Q8_0", *common])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("downloading") == 2 and TOKEN not in done.stderr
    assert json.loads(done.stdout)["model"]["name"] == "t.gguf"
    again = subprocess.run(
        [*COMMAND, "models", "list", "--json"], env=environment(), capture_output=True, text=True, check=True
    )
    assert [(model["repo"], model["quant"]) for model in json.loads(again.stdout)["models"]] == [
        ("big/t", ""),
        ("u/m", "Q8_0"),
    ]
    missing = finish(1, ["run", "-hf", "big/t:Q2_K", "--offline", *common])
    assert missing.returncode == 2 and "big/t has no Q2_K; there are t.gguf" in missing.stderr, missing.stderr


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "socks://127.0.0.1:1", "ftp://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_said(proxy: str, tmp_path: Path) -> None:
    environ = environment() | dict.fromkeys(("ALL_PROXY", "HTTP_PROXY"), proxy)
    environ |= {"HF_ENDPOINT": "http://hub.invalid", "HF_HOME": str(tmp_path), "NO_PROXY": ""}
    done = subprocess.run([*COMMAND, "plan", "-m", "hf:u/m"], capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 2 and "http://hub.invalid cannot be asked" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
