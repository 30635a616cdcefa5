from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import wire
from engine_adapter.vllm import config_line

STATUS = {"healthy": True, "version": "9.9", "memory_bytes": 64 << 20, "engines": [{}, {}]}
ATTACHED = wire.Attached(
    protocol=wire.PROTOCOL_VERSION,
    broker="test",
    incarnation=1,
    rows=0,
    row_bytes=0,
    rows_offset=0,
    generation_offset=0,
    memory_bytes=0,
    epoch=0,
)


def _serve(listener: socket.socket, answers: list[wire.Message]) -> None:
    connection, _ = listener.accept()
    with connection:
        reader = wire.FrameReader()
        for answer in answers:
            while reader.next() is None:
                data = connection.recv(4096)
                if not data:
                    return
                reader.feed(data)
            connection.sendall(wire.encode(answer))


@pytest.fixture
def answers() -> list[wire.Message]:
    return [ATTACHED, wire.StatusReply(seq=1, status=STATUS)]


@pytest.fixture
def broker(tmp_path: Path, answers: list[wire.Message]) -> Iterator[str]:
    path = str(tmp_path / "b.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=_serve, args=(listener, answers))
        thread.start()
        yield path
        thread.join(10)
        assert not thread.is_alive()


def test_json_is_what_vllm_takes(broker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_line.main(["--socket", broker, "--blocks-per-chunk", "2", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "kv_connector": "KvquayConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket": broker,
            "offload_prompt_only": False,
            "blocks_per_chunk": 2,
        },
    }
    assert len(printed.out.splitlines()) == 1
    assert not printed.err


def test_the_line_survives_a_shell(broker: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = "/a folder/with 'quotes' and $HOME"
    assert config_line.main(["--socket", broker, "--model", model]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("vllm serve")
    )
    script = f'vllm() {{ for one in "$@"; do printf "%s\\n" "$one"; done; }}; {line}'
    words = subprocess.run(
        ["sh", "-c", script], check=True, capture_output=True, text=True, timeout=10
    ).stdout.splitlines()
    assert words == shlex.split(line)[1:]
    assert words[:3] == ["serve", model, "--kv-transfer-config"]
    assert json.loads(words[3]) == config_line.transfer_config(broker)


@pytest.mark.parametrize(
    "choice",
    ["offload_prompt_only", "recompute", "reset_connector=True", "reset_external=true", "9.9"],
)
def test_the_choices_are_told(broker: str, choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_line.main(["--socket", broker]) == 0
    assert choice in capsys.readouterr().out


def test_no_broker_is_told_and_the_json_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "none.sock")
    assert config_line.main(["--socket", path, "--json"]) == config_line.EXIT_NO_BROKER
    printed = capsys.readouterr()
    assert json.loads(printed.out) == config_line.transfer_config(path)
    assert f"no broker answers at {path}" in printed.err
    assert "kvquay serve" in printed.err


REFUSED = wire.Refused(code=wire.RefusalCode.VERSION, ours="2", theirs="1", text="too old")


@pytest.mark.parametrize("answers", [[REFUSED], [ATTACHED], [ATTACHED, ATTACHED]])
def test_what_is_no_broker_of_ours_is_told(broker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_line.main(["--socket", broker, "--json"]) == config_line.EXIT_NO_BROKER
    assert f"no broker answers at {broker}" in capsys.readouterr().err


def test_the_socket_is_found_as_other_commands_find_it() -> None:
    find = wire.absolute_socket_path
    assert find("/a.sock", {"KVQUAY_SOCKET": "/b.sock"}) == "/a.sock"
    assert find(None, {"KVQUAY_SOCKET": "/b.sock"}) == "/b.sock"
    assert find(None, {"XDG_RUNTIME_DIR": "/run"}) == "/run/kvquay/broker.sock"
    assert find("b.sock", {}) == str(Path.cwd() / "b.sock")


@pytest.mark.parametrize("blocks", ["0", "-1", "x"])
def test_a_wrong_number_of_blocks_is_refused(blocks: str) -> None:
    with pytest.raises(SystemExit):
        config_line.main(["--blocks-per-chunk", blocks])


def test_neither_vllm_nor_torch_is_imported() -> None:
    code = (
        "import sys, engine_adapter.vllm.config_line;"
        "assert not {'vllm', 'torch', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
