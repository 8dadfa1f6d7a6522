"""What the benchmarks conclude from what they measure, and the models they make."""

import json
import os
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accuracy, every_type, gpu, ops, serving, threads, throughput
from benchmarks.contenders import Infinilm, Task, Times
from benchmarks.machine import microarchitecture, short
from benchmarks.random_model import TYPES, Size, kind_of, write_model
from benchmarks.report import (
    BANDWIDTH,
    TARGETS,
    Accuracy,
    Check,
    ModelResult,
    checks,
    markdown,
    rate_table,
    summary,
)
from benchmarks.side_by_side import PLANS, Effort
from benchmarks.timing import rounds_within
from benchmarks.worker import Worker, answer, library_memory, peak_memory
from infinilm import LLM, SamplingParams
from infinilm.bench import Measured
from infinilm.load import Answer, Arrivals, measured

MB = 1e6
TINY = Size(2, 64, 96, num_heads=2, num_kv_heads=1)


@pytest.fixture
def result() -> ModelResult:
    """Twice as fast as llama.cpp, at 604 MB read 30 times a second of 20 GB."""
    return ModelResult(
        "1B Q4_0",
        file_bytes=int(606 * MB),
        weight_bytes=int(604 * MB),
        cache_bytes=int(30 * MB),
        load_seconds={"infinilm": 1.5, "llama.cpp": 0.5},
        imported_bytes={"infinilm": 250 * MB, "llama.cpp": 40 * MB},
        rates={"decode": {"infinilm": Measured((29.0, 30.0, 31.0)), "llama.cpp": Measured((15.0,))}},
        bandwidth={"decode": Measured((20e9,))},
        peak_bytes={"infinilm": 1000 * MB, "llama.cpp": 700 * MB},
    )


def found(result: ModelResult, what: str, has_amx: bool = False) -> list[Check]:
    checked = checks([result], first_token_seconds=1.0, has_amx=has_amx)
    return [check for check in checked if check.what == what]


def test_a_target_is_compared_with_the_ratio_of_the_medians(result: ModelResult) -> None:
    result.rates["prefill 512"] = result.rates["decode"]
    result.bandwidth["prefill 512"] = result.bandwidth["decode"]
    (check,), (on_amx,) = (found(result, "prefill 512, 1B Q4_0", has_amx) for has_amx in (False, True))
    assert str(check) == "prefill 512, 1B Q4_0: target ≥ 2x llama.cpp, found 2.00x: met"
    assert str(on_amx) == "prefill 512, 1B Q4_0: target ≥ 5x llama.cpp, found 2.00x: missed"


@pytest.mark.parametrize(
    "rate, bandwidth, verdict", [(20.0, 13e9, "met"), (26.0, 40e9, "met"), (20.0, 40e9, "missed")]
)
def test_decoding_is_fast_enough_beside_llama_cpp_or_beside_the_memory(
    result: ModelResult, rate: float, bandwidth: float, verdict: str
) -> None:
    result.rates["decode"]["infinilm"] = Measured((rate,))
    result.bandwidth["decode"] = Measured((bandwidth,))
    assert result.ratio("decode", "infinilm", BANDWIDTH) == pytest.approx(rate * 604e6 / bandwidth)
    assert [check.verdict for check in found(result, "decode, 1B Q4_0")] == [verdict]


def test_a_peer_that_is_not_made_for_the_cpu_has_a_remark_and_no_target(result: ModelResult) -> None:
    dense = replace(result, name="1B BF16")
    assert "≥ 1.3x llama.cpp" in {check.target for check in found(dense, "decode, 1B BF16")}
    dense.rates["decode"]["llama.cpp"] = Measured((0.9,))
    assert "0.9 ±0% (33.33x, not made for this CPU)" in rate_table(dense)
    assert [check.target for check in found(dense, "decode, 1B BF16")] == ["≥ 85% of the read bandwidth"]


def test_logits_that_are_off_have_a_row_and_a_target(result: ModelResult) -> None:
    result.accuracy = {"infinilm": Accuracy(2e-6, 0.998)}
    (check,) = found(result, "logits against the exact model's, 1B Q4_0")
    assert check.found == "2.0e-06, 99.80%" and not check.is_met
    assert "| KL against the exact model | 2.0e-06 | – |\n| same top token | 99.80% | – |" in rate_table(
        result
    )


def test_memory_is_counted_beyond_imports_and_the_cache(result: ModelResult) -> None:
    (check,) = found(result, "memory beyond imports and the cache, 1B Q4_0")
    assert check.found == "1.19x" and not check.is_met


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped")
def test_the_libraries_of_a_process_are_some_of_its_memory() -> None:
    found = library_memory(os.getpid())
    assert 1 * MB < found < peak_memory(os.getpid())


def test_a_ratio_of_what_varied_much_is_called_noisy(result: ModelResult) -> None:
    result.rates["decode"]["llama.cpp"] = Measured((5.0, 15.0, 30.0))
    assert found(result, "decode, 1B Q4_0")[0].found.endswith(", noisy: ±83%")


def test_a_peer_that_was_not_measured_has_no_target_and_a_dash(result: ModelResult) -> None:
    del result.rates["decode"]["llama.cpp"]
    checked = list(checks([result], first_token_seconds=1.0, has_amx=False))
    assert not [check for check in checked if "llama.cpp" in check.target]
    assert "| decode | 30.0 ±3% | – |" in markdown([result], checked, {})


def test_every_target_is_measured_by_a_full_run() -> None:
    tasks = {(model, task.name) for model, plan in PLANS.items() for task in plan}
    peers = {(model, peer) for model, plan in PLANS.items() for names in plan.values() for peer in names}
    assert {(target.model, target.task) for target in TARGETS} <= tasks
    assert {(t.model, t.against) for t in TARGETS if t.against != BANDWIDTH} <= peers


def test_rounds_end_at_their_budget_but_not_before_the_least() -> None:
    assert len(list(rounds_within(5, 2, budget=0.0))) == 2
    assert len(list(rounds_within(5, 2, budget=60.0))) == 5


def test_the_readmes_table_is_what_the_results_say() -> None:
    root = Path(__file__).parent.parent
    assert summary(root / "benchmarks" / "results") in (root / "README.md").read_text()


def test_machines_are_compared_task_by_task(result: ModelResult, tmp_path: Path) -> None:
    other = replace(result, accuracy={"infinilm": Accuracy(1e-6, 1.0), "llama.cpp": Accuracy(1e-2, 0.9)})
    for name, model in {"a-1": result, "b-2": other}.items():
        (tmp_path / name).mkdir()
        content = {"machine": {"CPU": f"CPU {name}"}, "models": [asdict(model)]}
        (tmp_path / name / "side_by_side.json").write_text(json.dumps(content))
    told = summary(tmp_path)
    assert "- a-1: CPU a-1\n- b-2: CPU b-2\n\n| infinilm to llama.cpp | a-1 | b-2 |\n" in told
    assert "| 1B Q4_0, decode | 2.00x | 2.00x |\n" in told
    assert "| 1B Q4_0, KL against the exact model | – | 1.0e-06 to 1.0e-02 |\n" in told


# ---- machines ----

X86 = (
    "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nflags\t\t: fpu {}\n\nprocessor\t: 1\n"
)


@pytest.mark.parametrize(
    "cpuinfo, name",
    [
        (X86.format("GenuineIntel", 6, 207, "amx_tile"), "Emerald Rapids"),
        (X86.format("GenuineIntel", 6, 85, "avx512f"), "Skylake"),
        (X86.format("GenuineIntel", 6, 85, "avx512f avx512_vnni"), "Cascade Lake"),
        (X86.format("AuthenticAMD", 25, 1, "avx2"), "Zen 3"),
        (X86.format("AuthenticAMD", 25, 17, "avx512f"), "Zen 4"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "Neoverse-N1"),
        (X86.format("GenuineIntel", 6, 1, ""), None),
    ],
)
def test_a_cpu_is_known_by_its_numbers(cpuinfo: str, name: str | None) -> None:
    assert microarchitecture(cpuinfo) == name


def test_a_machines_name_is_short() -> None:
    names = [
        "Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz",
        "AMD EPYC 7763 64-Core Processor",
        "NVIDIA H200 (sm 9.0)",
    ]
    assert [short(name) for name in names] == ["intel-xeon-e5-2686-v4", "amd-epyc-7763", "h200"]


# ---- models ----


QUICK_TYPES = ("Q4_K_M", "BF16")  # made in ways of their own; what is tiny below is in Q4_0
OTHER_TYPES = [pytest.param(name, marks=pytest.mark.slow) for name in TYPES if name not in QUICK_TYPES]


@pytest.mark.parametrize("type_name", [*QUICK_TYPES, *OTHER_TYPES])
def test_a_random_model_loads_and_speaks(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_model(path, type_name, Size(2, 256, 256, num_heads=4, num_kv_heads=4))
    (answer,) = LLM(path).generate("The sky", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["random.gguf"]


def test_a_mix_of_types_has_more_bits_in_half_of_the_layers() -> None:
    kinds = [kind_of(f"blk.{i}.ffn_down.weight", (256, 256), "Q4_K_M", 16) for i in range(16)]
    assert kinds.count("Q6_K") == 8 and kinds[0] == kinds[15] == "Q6_K" and kinds[2] == "Q4_K"
    assert kind_of("token_embd.weight", (256, 256), "Q4_K_M", 16) == "Q6_K"
    assert kind_of("blk.0.attn_q.weight", (256, 256), "Q4_K_M", 16) == "Q4_K"


def test_a_type_that_the_engine_does_not_know_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert every_type.known(["Q4_0", "Q9_9"]) == ["Q4_0"]
    assert capsys.readouterr().out == "Q9_9 is left out: infinilm does not know it\n"


# ---- logits ----


def test_a_divergence_is_the_mean_over_all_tokens() -> None:
    exact = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    found = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    told = accuracy.accuracy(exact, found)
    assert told.share_same == 0.5 and told.divergence == pytest.approx(
        (2 * torch.sigmoid(exact[1, 0]) - 1) / 2
    )
    assert accuracy.accuracy(exact, exact + 3.0) == Accuracy(pytest.approx(0.0), 1.0)


@pytest.mark.skipif(not find_spec("llama_cpp"), reason="llama.cpp is not installed")
def test_contenders_tell_the_logits_of_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_model(path, "BF16", TINY)
    exact = accuracy.exact_logits(path, [3, 1, 4, 1, 5], 1)
    worker = Worker("llama.cpp", str(path), 1)
    torch.testing.assert_close(accuracy.logits_of(worker, [3, 1, 4, 1, 5]), exact, rtol=0, atol=0.05)
    worker.close()


# ---- threads ----


def scaled(*medians: float) -> dict[int, Measured]:
    return {count: Measured((median,)) for count, median in zip((1, 2, 16), medians, strict=False)}


def test_threads_are_counted_by_twos_up_to_all() -> None:
    assert [threads.counts_up_to(most) for most in (1, 2, 6, 16)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16],
    ]


def test_threads_are_worth_most_of_themselves_and_more_than_the_peers() -> None:
    curves = {"infinilm": scaled(10.0, 18.0, 80.0), "llama.cpp": scaled(5.0, 9.5, 30.0)}
    found = threads.Found({"decode": curves})
    two, many = threads.checks(found)
    assert two.found == "1.80x (90%), llama.cpp 1.90x" and not two.is_met
    assert many.target == "ahead of llama.cpp's speed-up" and many.is_met
    assert "| 2 | 18.0 ±0%, 1.80x, 90% of linear | 9.5 ±0%, 1.90x, 95% of linear |" in threads.thread_table(
        found, "decode"
    )


def test_threads_and_a_busy_core_are_measured_in_processes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "PAIR", ("infinilm",))
    monkeypatch.setattr(threads, "TASKS", (threads.prefill(40),))
    found, notes = threads.run(tiny, [1, 2], num_rounds=2)
    threads.write_results(found, {"CPU": "a CPU", "model": "tiny", **notes}, tmp_path / "threads")
    written = json.loads((tmp_path / "threads.json").read_text())
    assert list(written["curves"]["prefill 40"]["infinilm"]) == ["1", "2"]
    assert "| infinilm |" in (tmp_path / "threads.md").read_text().partition("beside a busy core")[2]


# ---- contenders and many streams ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "tiny.gguf"
    write_model(path, "Q4_0", TINY)
    return path


def test_infinilm_decodes_the_same_tokens_after_each_rewind(tiny: Path, keep_threads: None) -> None:
    contender = Infinilm(str(tiny), 2)
    contender.open(Task("decode", 20, 3, 4))
    contender.fill()
    seen = []
    for _ in range(2):
        contender.rewind()
        contender.decode()
        seen.append([stream.token_ids.tolist() for stream in contender.streams.streams])
    assert seen[0] == seen[1]
    assert [len(tokens) for tokens in seen[0]] == [20 + 1 + 1 + 4] * 3


def test_a_task_that_is_opened_again_is_run_in_the_cache_it_has(tiny: Path, keep_threads: None) -> None:
    contender, task = Infinilm(str(tiny), 2), Task("prefill 20", 20)
    seen = []
    for _ in range(2):
        contender.open(task)
        contender.fill()
        seen.append((contender.streams, contender.streams.streams[0].token_ids.tolist()))
    assert seen[0] == seen[1] and len(seen[0][1]) == 21


def test_a_task_that_is_served_tells_the_times_of_all_tokens(tiny: Path, keep_threads: None) -> None:
    contender, task = Infinilm(str(tiny), 2), Task("3 streams", 20, 3, 4, is_served=True)
    times = Times(**answer(contender, task, is_open=False))
    assert len(times.first) == 3 and len(times.gaps) == 3 * 3
    assert max(times.first) < times.seconds and min(times.gaps) >= 0
    assert task.num_counted == 3 * 24


def test_throughput_is_measured_in_processes_and_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "PROMPT", 8)
    monkeypatch.setattr(throughput, "NUM_NEW", 3)
    monkeypatch.setattr(throughput, "FAST", ("infinilm",))
    served, notes = throughput.run_model("tiny", tiny, (1, 2), Effort(2, 2))
    assert list(served.points["infinilm"]) == [1, 2] and "level" in notes["infinilm"]
    throughput.write_results([served], {"CPU": "a CPU", **notes}, tmp_path / "throughput")
    written = json.loads((tmp_path / "throughput.json").read_text())["models"][0]["points"]["infinilm"]["2"]
    assert len(written["rates"]["runs"]) == 2 and written["gaps"]["p99"] > 0
    assert (
        "| tiny, seconds to the first token, p50 / p99 | infinilm |"
        in (tmp_path / "throughput.md").read_text()
    )
    assert (tmp_path / "throughput.png").exists() == bool(find_spec("matplotlib"))


def test_a_contender_that_failed_at_some_streams_has_a_dash_there() -> None:
    ours, theirs = (Times(seconds, [seconds], [0.1, 0.3]) for seconds in (1.0, 2.0))
    task = throughput.task_of(8)
    point, slower = (throughput.Point.of(task, [times, times]) for times in (ours, theirs))
    served = throughput.Served("a model", {"infinilm": {8: point, 16: point}, "llama.cpp": {8: slower}})
    rates, first, gaps = throughput.tables(served)
    assert "| 8 | 1536.0 ±0% | 768.0 ±0% (2.00x) |" in rates and "| 16 | 1536.0 ±0% | – |" in rates
    assert "| 8 | 1 / 1 | 2 / 2 |" in first
    assert "| 8 | 0.1 / 0.3 | 0.1 / 0.3 |" in gaps


# ---- servers ----


def served(rate: float) -> dict[str, Any]:
    """What a server gave whose clients had so many tokens a second"""
    moments = [0.1, 0.1 + 4 / rate]
    answer = Answer(0.0, 0.0, 5 / rate, moments, num_prompt=3, num_usage=5)
    return measured([answer], Arrivals(2.0), serving.LIMITS)


def test_servers_are_compared_by_their_medians_and_a_missing_one_has_no_target() -> None:
    found = serving.Found({"infinilm": {16: [served(50.0), served(70.0)]}, "xllamacpp": {16: [served(20.0)]}})
    found.alone, found.served, found.health = [1.0, 2.0, 9.0], [1.04, 2.0, 9.9], [0.01, 0.2]
    peer, health, added = serving.checks(found)
    assert str(peer) == "output tokens a second, 16 clients: target ≥ 4x xllamacpp, found 3.00x: missed"
    assert added.found == "+4.0%" and added.is_met
    assert health.found == "200.0 ms" and not health.is_met
    assert "| 16 | 60 ±25% | 20 ±0% (3.00x) |" in serving.markdown(found, [peer, added], {})


def test_a_server_that_was_asked_no_more_at_a_rate_has_a_dash_there() -> None:
    found = serving.Found(rates={"infinilm": [served(50.0)], "xllamacpp": []})
    assert serving.rate_table(found).splitlines()[-1].endswith(" | – |")


def test_our_server_is_started_asked_and_written_about(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PROMPT", 8)
    monkeypatch.setattr(serving, "NUM_NEW", 3)
    monkeypatch.setattr(serving, "CLIENTS", {2: 4})
    monkeypatch.setattr(serving, "AT", 2)
    monkeypatch.setattr(serving, "NUM_AT_RATE", 2)
    found, runs = serving.Found(), serving.Runs()
    with serving.running("infinilm", tiny, 2) as target:
        serving.closed_loop({"infinilm": target}, [2], 1, runs, found)
        serving.open_loop({"infinilm": target}, [50.0], runs, found)
        serving.added_time(target, tiny, 2, 1, found)
    assert len(found.alone) == len(found.served) == 1 and min(found.alone + found.served) > 0
    assert found.clients["infinilm"][2][0]["total_output_tokens"] == 4 * 3 and found.health
    serving.write_results(found, {"CPU": "a CPU"}, tmp_path / "serving")
    assert json.loads((tmp_path / "serving.json").read_text())["rates"]["infinilm"][0]["completed"] == 2
    assert (tmp_path / "serving.png").exists() == bool(find_spec("matplotlib"))


def test_a_server_that_does_not_start_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('loading'); sys.exit('no such model: ' + sys.argv[1])"
    broken = serving.Contender(lambda path, port, num_threads: ["-c", program, path])
    monkeypatch.setitem(serving.CONTENDERS, "infinilm", broken)
    with (
        pytest.raises(RuntimeError, match=r"infinilm did not start: no such model: nothing\.gguf"),
        serving.running("infinilm", Path("nothing.gguf"), 2),
    ):
        pass


# ---- on a GPU ----------------------------------------------------------------------------------------------


def test_a_gpus_table_has_rates_shares_of_its_limits_and_what_was_left_out() -> None:
    results = gpu.Results(
        "a GPU",
        "torch",
        copy_rate=4e12,
        product_rate=1e15,
        weight_bytes={"infinilm": 16 * 10**9},
        steps={"infinilm": {1: 0.005, 128: 0.01}, "transformers": {1: 0.1}},
        prompts={"infinilm": {512: gpu.prompt_operations(512) / 5e14}},
        contexts={1024: 0.005},
        notes=["transformers compiled: left out"],
    )
    table = gpu.markdown(results)
    # 16 GB of weights take 4 ms, and 128 streams of 1,024 tokens with 128 KB of keys and values 4.3 ms
    assert "| infinilm | 200 (81%) | 12,800 (83%) |" in table
    assert "| transformers | 10 | – |" in table
    assert (
        "(50%) |" in table and "| 1,024 | 5.000 |" in table and "- transformers compiled: left out" in table
    )


def test_a_race_of_an_op_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ops", "--ops", "relu"])
    with pytest.raises(SystemExit):
        ops.main()
    assert "no row has 'relu' in its name; there are add, add_rms_norm, " in capsys.readouterr().err
