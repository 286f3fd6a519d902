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
        """A heap of (place, arrival, id). Who was removed still stands in it, until it is first."""
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        place = self._policy(request, self._num_arrivals)
        heapq.heappush(self._line, (place, self._num_arrivals, request.request_id))
        self._num_arrivals += 1
        self._requests[request.request_id] = request

    def peek(self) -> Request:
        while self._line[0][2] not in self._requests:
            heapq.heappop(self._line)
        return self._requests[self._line[0][2]]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._line)
        return self._requests.pop(request.request_id)

    def remove(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        if len(self._line) > 2 * len(self._requests) + 16:
            # Many were removed from behind one that waits.
            self._line = [each for each in self._line if each[2] in self._requests]
            heapq.heapify(self._line)
        return request
