"""What the patch adds: when it switches, what it says and counts, what it refuses."""

from __future__ import annotations

import ast
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patch.conftest import VARIANTS

LAST = {name: variant["sglang"][-1] for name, variant in VARIANTS.items()}
GOOD = {
    "speculative_disable_batch_threshold": 16,
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 1,
    "speculative_adaptive": False,
    "speculative_use_rejection_sampling": False,
    "disable_overlap_schedule": False,
    "enable_multi_layer_eagle": False,
    "enable_dp_attention": False,
    "attn_dp_size": 1,
    "pp_size": 1,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_lora": None,
    "disaggregation_mode": "null",
    "enable_return_hidden_states": False,
    "device": "cuda",
}
BAD = {
    "speculative_disable_batch_threshold": -1,
    "speculative_algorithm": "STANDALONE",
    "speculative_eagle_topk": 4,
    "speculative_adaptive": True,
    "speculative_use_rejection_sampling": True,
    "disable_overlap_schedule": True,
    "enable_multi_layer_eagle": True,
    "enable_dp_attention": True,
    "attn_dp_size": 2,
    "pp_size": 2,
    "enable_two_batch_overlap": True,
    "enable_pdmux": True,
    "enable_lora": True,
    "disaggregation_mode": "decode",
    "enable_return_hidden_states": True,
    "device": "npu",
}
CLOCK = SimpleNamespace(now=100.0, monotonic=lambda: CLOCK.now)


def part(variant: str, *names: str) -> dict[str, Any]:
    """Run the named definitions of a variant's module alone: they need no torch."""
    path = "sglang/srt/speculative/batch_threshold.py"
    source = next(file["create"] for file in VARIANTS[variant]["files"] if file["path"] == path)
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(tree.body) == len(names)
    space: dict[str, Any] = {"time": CLOCK, "logger": logging.getLogger("batch_threshold")}
    exec(compile(tree, path, "exec"), space)
    return space


@pytest.fixture(params=VARIANTS)
def check(request):
    return part(request.param, "check_value", "check_batch_threshold")["check_batch_threshold"]


def asked(check: Any) -> set[str]:
    return set(check.__code__.co_names) & set(GOOD)


def test_a_good_configuration_passes(check):
    check(SimpleNamespace(**GOOD))


def test_zero_asks_for_nothing_else(check):
    check(SimpleNamespace(**{**BAD, "speculative_disable_batch_threshold": 0}))


def test_each_refusal_names_the_flag_and_the_reason(check):
    for name in asked(check):
        with pytest.raises(ValueError, match="--speculative-disable-batch-threshold") as refusal:
            check(SimpleNamespace(**{**GOOD, name: BAD[name]}))
        assert len(str(refusal.value)) > 60


def test_everything_that_could_go_wrong_is_asked_for(check):
    never = {"speculative_adaptive", "speculative_use_rejection_sampling", "disable_overlap_schedule"}
    data_parallel = {"enable_dp_attention", "attn_dp_size"}
    assert set(GOOD) - asked(check) <= never | data_parallel
    assert asked(check) & data_parallel


@pytest.fixture(params=VARIANTS)
def policy(request):
    return part(request.param, "SwitchLog", "Policy")["Policy"]


def test_the_threshold_itself_still_speculates(policy, caplog):
    caplog.set_level(logging.INFO)
    here = policy(16, 0)
    assert [here.choose_plain(size) for size in (1, 16, 17, 128, 17, 16, 1)] == [
        False, False, True, True, True, False, False,
    ]  # fmt: skip
    assert here.state == {
        "threshold": 16, "resume": 16, "plain_steps": 3, "speculative_steps": 4, "switches": 2,
    }  # fmt: skip
    assert [record.message for record in caplog.records] == [
        "Batch threshold: speculation off, decode batch 17 exceeds 16",
        "Batch threshold: speculation on, decode batch 16 within 16",
    ]


def test_an_idle_step_counts_for_nothing(policy):
    here = policy(4, 0)
    here.choose_plain(5)
    assert here.choose_plain(0) is False
    assert here.plain and here.state["plain_steps"] == 1 and here.state["speculative_steps"] == 0


def test_flapping_is_said_once_a_second(policy, caplog):
    caplog.set_level(logging.INFO)
    here = policy(4, 0)
    for size in (5, 4) * 10:
        here.choose_plain(size)
    assert here.state["switches"] == 20
    assert len(caplog.records) == 2
    CLOCK.now += 2
    here.choose_plain(5)
    assert caplog.records[-1].message.endswith(
        "off, decode batch 5 exceeds 4 (9 more such switches since the last line)"
    )


def test_only_the_first_rank_speaks(policy, caplog):
    caplog.set_level(logging.INFO)
    policy(4, 1).choose_plain(5)
    assert caplog.records == []
