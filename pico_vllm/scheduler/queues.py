"""The waiting line: requests in the order of a policy, with removal from anywhere. Host only."""

from __future__ import annotations

import heapq

from pico_vllm.request import Request
from pico_vllm.scheduler.policy import Policy, fcfs


class WaitingQueue:
    """Lowest place first, the earlier arrival among equals."""

    def __init__(self, policy: Policy = fcfs) -> None:
        self._policy = policy
        self._requests: dict[str, Request] = {}
        self._line: list[tuple[int, int, str]] = []
        """A heap of (place by the policy, arrival, id). Who was removed stays until it is first."""
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        request.place = (self._policy(request, self._num_arrivals), self._num_arrivals)
        self._num_arrivals += 1
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Let one that was in line before stand at its old place again."""
        self._requests[request.request_id] = request
        heapq.heappush(self._line, (*request.place, request.request_id))

    def peek(self) -> Request:
        while self._line[0][2] not in self._requests:
            heapq.heappop(self._line)
        return self._requests[self._line[0][2]]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._line)
        return self._requests.pop(request.request_id)

    def check_invariants(self) -> None:
        in_line = {each[2] for each in self._line}
        for request_id, request in self._requests.items():
            assert request_id in in_line, f"{request_id} would never come up"
            assert (request.row, request.block_ids) == (-1, []), f"{request_id} waits with blocks"

    def remove(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        if len(self._line) > 2 * len(self._requests) + 16:
            # Many were removed from behind one that waits.
            self._line = [each for each in self._line if each[2] in self._requests]
            heapq.heapify(self._line)
        return request
