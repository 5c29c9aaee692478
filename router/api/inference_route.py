"""InferenceRoute: base ASGI route of requests that use nodes: in-flight limit, body, errors, and cancellation."""

from __future__ import annotations

import logging
import time
from typing import Generic, Protocol, TypeVar

from prometheus_client import Counter
from starlette.types import Receive, Scope, Send

from kvferry.protocol.errors import KvferryError, Overloaded
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.api.admission import AdmittedRequest
from kvferry.router.api.bodies.reader import BodyReader
from kvferry.router.api.responder import Finishing, Responder, no_chunk
from kvferry.router.api.served_models import ServedModels
from kvferry.router.request_context import CALL
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.runtime.disconnect import until_disconnect
from kvferry.runtime.tracing import TRACER

logger = logging.getLogger(__name__)


class InflightLimit:
    """Limit of generating requests in progress; `count` is their number.

    A request counts from the end of its body on, so that a slow sender occupies no place."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def check(self, own: int = 0) -> None:
        """Raise Overloaded if the limit is reached; call it before the body is read.

        `own` counts the tenant's requests in progress. It may not exceed the free places, so one tenant never takes
        all."""
        if self.count >= self._limit or own > self._limit - self.count:
            raise Overloaded(f"{self.count} requests are in progress, the limit of this router", retry_after=1.0)

    def enter(self, own: int = 0) -> None:
        """Count a request, or raise Overloaded; the caller must call `leave`."""
        self.check(own)
        self.count += 1

    def keep_counted(self) -> None:
        """Count a request once more for work that continues after its answer; call `leave` for each."""
        self.count += 1

    def leave(self) -> None:
        """Stop counting a request."""
        self.count -= 1


class Placed(Protocol):
    """Interface of an endpoint for its route."""

    @property
    def path(self) -> str:
        """Return the path of the endpoint."""


Described = TypeVar("Described", bound=Placed)


class InferenceRoute(Generic[Described]):
    """ASGI application of an endpoint whose work runs on nodes.

    It notices a disconnect of the client at any point and then cancels all dispatches. It sends headers with the first
    output, so that earlier errors get a status."""

    def __init__(
        self,
        endpoint: Described,
        pools: ServedModels,
        admission: InflightLimit,
        reader: BodyReader,
        tenant_registry: TenantRegistry,
        metrics: RouterMetrics,
    ) -> None:
        self.endpoint = endpoint
        self._path = endpoint.path
        self._pools = pools
        self._admission = admission
        self._reader = reader
        self._tenant_registry = tenant_registry
        self._metrics = metrics
        self._e2e = metrics.e2e.labels()
        self._counters: dict[int, Counter] = {}
        """Finished requests by status; looking up a counter by its labels costs more than counting."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, metrics, status = scope[CALL], self._metrics, 500
        span = TRACER.start("request", call.trace, endpoint=self._path, id=call.id, tenant=call.tenant)
        admitted = AdmittedRequest(call, self._tenant_registry, metrics, span)
        write_chunk = getattr(getattr(receive, "__self__", None), "write_chunk", no_chunk)
        responder = Responder(send, self._path, admitted.headers, write_chunk)
        metrics.inflight.inc()
        try:
            with admitted:
                self._admission.check(admitted.running)
                data = await self._reader.take(scope, receive)
                self._admission.enter(admitted.running)
                try:
                    work = self._work(admitted, data, responder)
                    del data  # it may be long, and the stream too
                    answer = await until_disconnect(receive, work)
                    status = 200
                    self._e2e.observe(time.monotonic() - call.arrival)
                    await answer.finish(responder)
                finally:
                    self._admission.leave()
        except KvferryError as error:
            status = error.status
            admitted.refused(error)
            count_error(metrics, error)
            await responder.fail(error)
        except Exception:
            logger.exception("%s: %s failed", call.id, self._path)
            failed = KvferryError("internal error of the router; its log has the details")
            count_error(metrics, failed)
            await responder.fail(failed)
        finally:
            metrics.inflight.dec()
            self._count(status)
            admitted.over(status)
            responder.over()

    def _count(self, status: int) -> None:
        counter = self._counters.get(status)
        if counter is None:
            counter = self._counters[status] = self._metrics.requests.labels(self._path, str(status))
        counter.inc()

    async def _work(self, admitted: AdmittedRequest, data: bytes, responder: Responder) -> Finishing:
        """Do all work except sending the last bytes, after which the server reports the client as gone."""
        raise NotImplementedError


def count_error(metrics: RouterMetrics, error: KvferryError) -> None:
    """Count an error unless the client caused it."""
    if error.status == 429 or error.status >= 500:
        metrics.errors.labels(str(error.status), error.code).inc()
