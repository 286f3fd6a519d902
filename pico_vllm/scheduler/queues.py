"""The waiting line: requests in order of arrival, with removal from anywhere. Host only."""

from __future__ import annotations

from collections import OrderedDict

from pico_vllm.request import Request


class WaitingQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> Request | None:
        return self._requests.pop(request_id, None)
