"""What torch.compile does in a run: counted, timed and explained. A compilation in the middle of a run costs as much as many steps."""

from __future__ import annotations

from torch._dynamo.utils import CompilationMetrics, counters, get_compilation_metrics

_MOST_REASONS = 4


class Compilations:
    """The compilations of this process from now on. torch keeps the last 64 in detail: more than 64 between two log lines are counted as 64."""

    def __init__(self) -> None:
        self.seen = {_key(one) for one in get_compilation_metrics()}
        self.cached, self.breaks = _from_cache(), dict(counters["graph_break"])

    def take(self) -> tuple[dict[str, float], str] | None:
        """What was compiled since the last call, as `StepRecord.compiled` has it, and in words; None if nothing was."""
        new = [one for one in get_compilation_metrics() if _key(one) not in self.seen and one.co_name is not None]
        if not new:
            return None
        self.seen |= {_key(one) for one in new}
        again = [one for one in new if one.recompile_reason]
        breaks = {why: count - self.breaks.get(why, 0) for why, count in counters["graph_break"].items()}
        breaks = {why: count for why, count in breaks.items() if count}
        cached, self.cached, self.breaks = _from_cache() - self.cached, _from_cache(), dict(counters["graph_break"])
        counts = {
            "functions": len(new),
            "again": len(again),
            "graph_breaks": sum(breaks.values()),
            "from_cache": cached,
            "seconds": round(sum(one.entire_frame_compile_time_s or 0 for one in new), 1),
        }
        text = f"compiled {len(new)} functions in {counts['seconds']} s ({cached} graphs from the cache)"
        text += _because("anew for other inputs", len(again), [f"{one.co_name}: {one.recompile_reason}" for one in again])
        return counts, text + _because("graph breaks", counts["graph_breaks"], list(breaks))


def _key(metrics: CompilationMetrics) -> tuple[str, float | None]:
    return str(metrics.compile_id), metrics.start_time  # a reset of the compiler begins its numbers anew


def _because(what: str, count: int, reasons: list[str]) -> str:
    first_lines = [reason.strip().splitlines()[0] for reason in reasons[:_MOST_REASONS]]
    more = ["..."] if len(reasons) > _MOST_REASONS else []
    return f"; {what}: {count} ({'; '.join(first_lines + more)})" if count else ""


def _from_cache() -> int:
    return counters["inductor"]["fxgraph_cache_hit"]
