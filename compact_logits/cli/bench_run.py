"""One case of the bench: the gate, then memory, then interleaved rounds of time, and the floor in the same rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from compact_logits.cli.bench_case import Case, Inputs, make_inputs, true_results
from compact_logits.cli.bench_floor import Floor
from compact_logits.cli.bench_gate import OURS, PEERS, errors, judge, results
from compact_logits.cli.bench_timing import Clock, Measured, measure_peak, measure_time
from compact_logits.cli.bench_ways import Peer, Way, as_shipped, full_path, log_softmax, on_selected_rows, ours
from compact_logits.errors import CompactLogitsError

__all__ = ["Outcome", "make_ways", "run_case"]

_PLAIN = "plain torch"


@dataclass
class Outcome:
    """Of one case. `floors` are three and four products; `left_out` names what did not run, and why."""

    case: Case
    ways: list[Measured]
    floors: list[Measured]
    left_out: dict[str, str] = field(default_factory=dict)

    def find(self, name: str, view: str) -> Measured | None:
        return next((way for way in self.ways if (way.name, way.view) == (name, view)), None)

    @property
    def full_path(self) -> Measured:
        """slime's, or plain torch's where slime is absent."""
        return next(way for way in reversed(self.ways) if way.view == "full path")


def make_ways(case: Case, peers: list[Peer], budgets: list[int]) -> tuple[list[Way], dict[str, str]]:
    """Every way that can answer the case, the full path first; and those that cannot, with the reason."""
    plain = Peer(_PLAIN, ("none", "metric", "loss"), score=log_softmax)
    ways, left_out = [full_path(_PLAIN, log_softmax)], {}
    able = [plain]
    for peer in peers:
        if peer.score is None:
            left_out[peer.name] = peer.off
        elif case.entropy not in peer.entropy:
            known = "no entropy" if peer.entropy == ("none",) else "no gradient of the entropy"
            left_out[peer.name] = f"it has {known}"
        else:
            able.append(peer)
            if peer.name == "slime":
                ways.append(full_path("slime", peer.score))
    ways += [ours(budget) for budget in budgets]
    ways += [as_shipped(peer, case.device) for peer in able if peer.name not in (_PLAIN, "slime")]
    ways += [on_selected_rows(peer) for peer in able]
    return ways, left_out


def run_case(
    case: Case,
    peers: list[Peer],
    budgets: list[int],
    rounds: int,
    advance: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Outcome:
    """Measure every way; one that fails the gate, or fails altogether, keeps its name and its failure alone."""
    inputs = make_inputs(case)
    ways, left_out = make_ways(case, peers, budgets)
    runs = _pass_gate(ways, inputs, case, advance)
    outcome = Outcome(case, [found for _, found in runs], _floors(), left_out)
    timed = [(_phases(way, inputs, case), found) for way, found in runs if not found.failure]
    for forward, found in timed:
        found.forward_peak_mib, found.backward_peak_mib = measure_peak(forward, case.device)
    # After the peaks, since its buffers are as large as all that the ways hold.
    floor = Floor(case, inputs)
    for recompute, found in zip((False, True), outcome.floors, strict=True):
        timed.append((_floor_phases(floor, recompute), found))
        measure_time(_floor_phases(floor, recompute), case.device)
    for _ in range(rounds):  # in turn, so that a slow moment of the machine meets all of them
        for forward, found in timed:
            of_forward, of_backward = measure_time(forward, case.device, clock)
            found.forward_times.append(of_forward)
            found.backward_times.append(of_backward)
        advance()
    return outcome


def _pass_gate(ways: list[Way], inputs: Inputs, case: Case, advance: Callable[[], None]) -> list[tuple[Way, Measured]]:
    truth = true_results(case, inputs)
    of_plain = errors(results(ways[0], inputs, case), truth)
    runs = []
    for way in ways:
        found = Measured(way.name, way.view)
        runs.append((way, found))
        try:
            found.errors = errors(results(way, inputs, case), truth)
            found.failure = judge(found.errors, of_plain, OURS if way.view == "ours" else PEERS)
        except (Exception, SystemExit) as error:
            # Whatever a peer raises is its line in the table. Of ours it is too, and ends the command with 1.
            said = " ".join(str(error).split())[:160]
            found.failure = said if isinstance(error, CompactLogitsError) else f"{type(error).__name__}: {said}"
        advance()
    return runs


def _phases(way: Way, inputs: Inputs, case: Case) -> Callable[[], Callable[[], None]]:
    def forward() -> Callable[[], None]:
        hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
        log_probs, entropy = way.run(hidden, weight, inputs, case)
        roots, grads = [log_probs], [inputs.d_log_probs]
        if case.entropy == "loss":
            assert entropy is not None
            roots.append(entropy)
            grads.append(inputs.d_entropy.to(entropy.dtype))
        return lambda: torch.autograd.backward(roots, grads)

    return forward


def _floor_phases(floor: Floor, recompute: bool) -> Callable[[], Callable[[], None]]:
    def forward() -> Callable[[], None]:
        floor.forward()
        return lambda: floor.backward(recompute=recompute)

    return forward


def _floors() -> list[Measured]:
    return [Measured(f"{count} products of the kept rows", "floor") for count in ("three", "four")]
