from __future__ import annotations

import torch

from pipeline.verbs.stopwatch import Timed, Turn, matmul_flops, take_turns


def test_methods_take_turns_until_their_rounds_are_over() -> None:
    ran: list[str] = []
    timed = take_turns(
        {
            "a": Turn(lambda: ran.append("a"), documents=2, rounds=3, warm_up=True),
            "b": Turn(lambda: ran.append("b"), documents=1, rounds=1, warm_up=False),
        }
    )
    assert ran == ["a", "a", "b", "a", "a"]
    assert [len(timed[name].seconds) for name in "ab"] == [3, 1]


def test_a_ratio_is_the_median_of_paired_rounds() -> None:
    noisy, tree = Timed((2.0, 30.0, 4.0), 0), Timed((1.0, 10.0, 4.0), 0)
    assert noisy.times(tree) == 2 and tree.times(tree) == 1


def test_the_peak_counts_what_a_method_held_and_gave_back() -> None:
    def hold() -> None:
        torch.ones(1 << 26).mul_(2)  # 256 MB

    timed = take_turns({"hold": Turn(hold, documents=1, rounds=2, warm_up=False)})
    assert 0.8 * (1 << 28) < timed["hold"].peak_bytes < 1.3 * (1 << 28)


def test_the_rate_of_products_is_positive() -> None:
    assert matmul_flops(64, torch.device("cpu"), torch.float32) > 0
