"""Counters in Prometheus' text format. Any thread may count."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds until the first token
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts whose keys and values were held already.",
    "generated_tokens": "Tokens of answers.",
    "target_passes": "Forward passes of the target that verified a tree.",
    "accepted_drafts": "Drafted tokens that were emitted.",
    "cancelled": "Requests whose client went away or stopped reading.",
}


class Metrics:
    """What the server has done since it started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._counts: Counter[str] = Counter()
        self._ttft = [0] * (len(BUCKETS) + 1)
        self._ttft_sum = 0.0

    def request(self, path: str, status: int) -> None:
        """Count an answered request."""
        with self._lock:
            self._requests[path, status] += 1

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one of COUNTERS."""
        assert name in COUNTERS
        with self._lock:
            self._counts[name] += amount

    def first_token(self, seconds: float) -> None:
        """Note the time from a request to the first token of its answer."""
        with self._lock:
            self._ttft[sum(seconds > edge for edge in BUCKETS)] += 1
            self._ttft_sum += seconds

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Returns everything as text. gauges: name -> (what it is, its value now)."""
        lines = ["# HELP eagle_requests_total Requests by path and status.", "# TYPE eagle_requests_total counter"]
        with self._lock:
            for (path, status), count in sorted(self._requests.items()):
                lines.append(f'eagle_requests_total{{path="{path}",status="{status}"}} {count}')
            for name, meaning in COUNTERS.items():
                lines += [f"# HELP eagle_{name}_total {meaning}", f"# TYPE eagle_{name}_total counter"]
                lines.append(f"eagle_{name}_total {self._counts[name]}")
            lines.append("# HELP eagle_time_to_first_token_seconds From a request to its first token.")
            lines.append("# TYPE eagle_time_to_first_token_seconds histogram")
            below = 0
            for edge, count in zip((*map(str, BUCKETS), "+Inf"), self._ttft, strict=True):
                below += count
                lines.append(f'eagle_time_to_first_token_seconds_bucket{{le="{edge}"}} {below}')
            lines.append(f"eagle_time_to_first_token_seconds_sum {self._ttft_sum}")
            lines.append(f"eagle_time_to_first_token_seconds_count {below}")
        for name, (meaning, value) in gauges.items():
            lines += [f"# HELP eagle_{name} {meaning}", f"# TYPE eagle_{name} gauge", f"eagle_{name} {value:g}"]
        return "\n".join(lines) + "\n"
