"""What is seen of a run: TensorBoard's records, Prometheus' page, rates, the bar's words."""

from __future__ import annotations

import struct
from pathlib import Path

import httpx
import pytest
import trainer_kit as kit

from prime_core.errors import UserError
from prime_trainer.events import EventFile, crc32c, flat, scalars_event
from prime_trainer.metrics import Stopwatch
from prime_trainer.observe import MetricsServer, Observers, peak_flops, prometheus_text
from prime_trainer.progress import WORDS, Bar


def records(data: bytes) -> list[bytes]:
    """The payloads of an event file, every checksum checked as a reader does."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        (head,) = struct.unpack("<I", data[8:12])
        payload = data[12 : 12 + length]
        (tail,) = struct.unpack("<I", data[12 + length : 16 + length])
        for part, crc in ((data[:8], head), (payload, tail)):
            plain = crc32c(part)
            assert crc == (((plain >> 15) | (plain << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        found.append(payload)
        data = data[16 + length :]
    return found


def test_checksums_are_those_of_the_rfc() -> None:
    # RFC 3720, B.4
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes([0xFF] * 32)) == 0x62A8AB43


def test_an_event_file_holds_a_version_and_each_steps_numbers(tmp_path: Path) -> None:
    file = EventFile(tmp_path, 1.0)
    file.add(2.0, 300, {"reward": 0.5, "seconds/fetch": 0.25})
    version, event = records(file.path.read_bytes())
    assert version.endswith(b"brain.Event:2")
    assert event == scalars_event(2.0, 300, {"reward": 0.5, "seconds/fetch": 0.25})
    # wall_time 2.0, step 300, summary { value { tag simple_value } … }, byte for byte
    first = b"\x0a\x0d\x0a\x06reward\x15" + struct.pack("<f", 0.5)
    second = b"\x0a\x14\x0a\x0dseconds/fetch\x15" + struct.pack("<f", 0.25)
    body = first + second
    assert event == b"\x09" + struct.pack("<d", 2.0) + b"\x10\xac\x02\x2a" + bytes(
        [len(body)]
    ) + body  # fmt: skip


def test_a_lines_numbers_are_flat_and_words_are_left_out() -> None:
    line = {"step": 3, "batch": "0xab", "applied": True, "seconds": {"fetch": 0.5}, "alarms": []}
    assert dict(flat(line)) == {"step": 3.0, "applied": 1.0, "seconds/fetch": 0.5}


def test_the_metrics_page_shows_the_newest_step_and_what_is_waited_for() -> None:
    server = MetricsServer(0)
    server.start()
    try:
        server.show({"reward": 0.5, "seconds/fetch": 0.25, "seconds/plan": 0.125})
        server.waits("wait_batch")
        page = httpx.get(server.url)
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "prime_trainer_reward 0.5\n" in page.text
        assert 'prime_trainer_seconds{part="fetch"} 0.25\n' in page.text
        assert page.text.count("# TYPE prime_trainer_seconds gauge") == 1
        assert 'prime_trainer_waiting{for="wait_batch"} 1' in page.text
        assert httpx.get(server.url.replace("/metrics", "/other")).status_code == 404
        with pytest.raises(UserError, match="cannot be served"):
            MetricsServer(int(server.url.split(":")[2].split("/")[0]))
    finally:
        server.stop()


def test_prometheus_text_is_one_family_a_name() -> None:
    text = prometheus_text({"a/x": 1.0, "a/y": 2.0, "b": 3.0}, "start")
    assert text.splitlines() == [
        "# TYPE prime_trainer_a gauge",
        'prime_trainer_a{part="x"} 1',
        'prime_trainer_a{part="y"} 2',
        "# TYPE prime_trainer_b gauge",
        "prime_trainer_b 3",
        "# TYPE prime_trainer_waiting gauge",
        'prime_trainer_waiting{for="start"} 1',
    ]


def test_rates_are_of_computing_and_of_the_whole_step(tmp_path: Path) -> None:
    observers = Observers(peak=1e9)
    seconds = {"forward_backward": 3.0, "optimizer": 1.0, "wait_batch": 4.0}
    line = {"seconds": seconds, "tokens": 400, "flops": 2e9}
    observers.complete(line, ranks=2)
    assert line["tokens_s"] == 100.0
    assert line["tokens_s_wall"] == 50.0
    assert line["mfu"] == pytest.approx(2e9 / (4.0 * 1e9 * 2))
    skipped = {"seconds": {"wait_batch": 1.0}}
    observers.complete(skipped, ranks=1)
    assert "tokens_s" not in skipped


def test_a_devices_peak_is_its_own_name_longest_first_or_what_the_run_says(tmp_path: Path) -> None:
    settings = kit.settings(tmp_path, tmp_path)
    assert peak_flops(settings, "NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops(settings, "NVIDIA H100 PCIe") == 756e12
    assert peak_flops(settings, "cpu") is None
    assert peak_flops(kit.settings(tmp_path, tmp_path, peak_tflops=2.0), "cpu") == 2e12


def test_every_wait_is_told_before_it_begins() -> None:
    told: list[str] = []
    watch = Stopwatch(now=iter([0.0, 2.0, 2.0, 5.0]).__next__, begins=told.append)
    with watch.timed("wait_batch"):
        assert told == ["wait_batch"]
    with watch.timed("plan"):
        pass
    assert watch.seconds == {"wait_batch": 2.0, "plan": 3.0}


def test_the_bar_has_a_word_for_each_of_the_loops_waits() -> None:
    assert {"wait_batch", "share", "plan", "collate", "forward_backward", "statistics",
            "optimizer", "wait_kept", "snapshot", "proximal"} == set(WORDS)  # fmt: skip
    bar = Bar(10)
    bar.say("wait_batch")
    bar.step({"step": 3, "version": 4, "reward": 0.25})
    (task,) = bar._progress.tasks
    assert task.completed == 4
    assert task.fields["waits"] == WORDS["wait_batch"]
    assert "0.250" in task.fields["reward"]
