"""The waiting line: requests in the order of a policy, with removal from anywhere. Host only.

Some may be held: they keep their place, but others pass until they are let go.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from pico_vllm.request import Request
from pico_vllm.scheduler.policy import Policy, fcfs


class WaitingQueue:
    """Lowest place first, the earlier arrival among equals."""

    def __init__(self, policy: Policy = fcfs) -> None:
        self._policy = policy
        self._requests: dict[str, Request] = {}
        self._line: list[tuple[int, int, str]] = []
        """A heap of (rank, arrival, id). Entries of who was removed, held or ranked anew stay until
        they are first."""
        self._ranks: dict[str, int] = {}
        """Of those in line: the place by the policy, or better."""
        self.num_arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        request.place = (self._policy(request, self.num_arrivals), self.num_arrivals)
        self.num_arrivals += 1
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Let one that was in line before stand at its old place again."""
        self._requests[request.request_id] = request
        self._enter_line(request, request.place[0])

    def has_next(self) -> bool:
        """Whether one is not held."""
        return bool(self._ranks)

    def peek(self) -> Request:
        while self._ranks.get(self._line[0][2]) != self._line[0][0]:
            heapq.heappop(self._line)
        return self._requests[self._line[0][2]]

    def pop(self) -> Request:
        request = self.hold()
        return self._requests.pop(request.request_id)

    def hold(self) -> Request:
        """Let others pass the first one until it is let go."""
        request = self.peek()
        heapq.heappop(self._line)
        del self._ranks[request.request_id]
        return request

    def let_go(self, request_id: str) -> None:
        """Let one that is held come up again; one that has left the line or is not held may be
        named too."""
        request = self._requests.get(request_id)
        if request is not None and request_id not in self._ranks:
            self._enter_line(request, request.place[0])

    def first_to_come(self, count: int) -> Iterator[Request]:
        """So many of those that wait, in order of arrival but for those that came back."""
        return islice(self._requests.values(), count)

    def rank(self, request: Request, better_by: int) -> None:
        """Let a request stand before its place by the policy, if it is not held."""
        rank = request.place[0] - better_by
        if self._ranks.get(request.request_id, rank) != rank:
            self._enter_line(request, rank)

    def _enter_line(self, request: Request, rank: int) -> None:
        self._ranks[request.request_id] = rank
        heapq.heappush(self._line, (rank, request.place[1], request.request_id))
        self._tidy()

    def _tidy(self) -> None:
        if len(self._line) > 2 * len(self._ranks) + 16:
            # Many entries are nobody's any more, behind one that waits.
            self._line = [each for each in self._line if self._ranks.get(each[2]) == each[0]]
            heapq.heapify(self._line)

    def check_invariants(self) -> None:
        in_line = {(each[2], each[0]) for each in self._line}
        for request_id, rank in self._ranks.items():
            assert (request_id, rank) in in_line, f"{request_id} would never come up"
            assert rank <= self._requests[request_id].place[0], f"{request_id} behind its place"
        for request_id, request in self._requests.items():
            assert (request.row, request.block_ids) == (-1, []), f"{request_id} waits with blocks"

    def remove(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        self._ranks.pop(request_id, None)
        self._tidy()
        return request
