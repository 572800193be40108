"""The connector in vLLM's scheduler process: a door in front of
:class:`~kvxfer.connector.scheduler_side.SchedulerConnector`, which decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.connector.records import KVConnectorOutput
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.compat import REPORTS_FAILED_REQUESTS
from kvxfer.integrations.vllm.metadata import (
    KvxferHandshake,
    KvxferMetadata,
    KvxferWorkerMetadata,
)
from kvxfer.integrations.vllm.settings import Settings
from kvxfer.integrations.vllm.stats import KvxferStats, of_scheduler
from kvxfer.integrations.vllm.views import BlocksView, StepView, view_request, without_null
from kvxfer.transfer.wire import Reason

LAYOUT = "vllm"
"""What the manifest calls the layout; the regions say it exactly."""
EMBEDDINGS = "prompt_embeds"
"""Why a request runs plain whose prompt is not only tokens: nothing could bind its KV to them."""


class SchedulerSide:
    """One per engine, made before its ranks are known; from
    :meth:`set_xfer_handshake_metadata_pp_aware` on it works.

    Args:
        num_groups: KV cache groups of the model.

    Raises:
        ConfigError: several groups in a version that cannot report a failed load of theirs.
    """

    def __init__(self, settings: Settings, num_groups: int) -> None:
        if num_groups > 1 and not REPORTS_FAILED_REQUESTS:
            raise ConfigError(
                f"KV cache groups: expected 1, got {num_groups}; this vLLM cannot be told which "
                "request's load failed, only blocks of one group: use a later vLLM, or "
                "--disable-hybrid-kv-cache-manager"
            )
        self._settings = settings
        self._group_ids = tuple(range(num_groups))
        self._core: SchedulerConnector | None = None
        self._incarnation = b""
        self._failures: dict[str, str] = {}

    def set_xfer_handshake_metadata_pp_aware(self, ranks: Mapping[tuple[int, int], object]) -> None:
        """What the ranks say of themselves, by (pp, tp). Raises ConfigError if one is missing, is
        another connector's, or two do not agree.
        """
        known = {key: _ours(key, said) for key, said in ranks.items()}
        engines = {(said.incarnation, said.facts) for said in known.values()}
        if len(engines) != 1:
            raise ConfigError(f"ranks: expected to be of one engine, got {len(engines)}")
        ((incarnation, facts),) = engines
        if self._core is None or incarnation != self._incarnation:
            settings = self._settings
            self._incarnation = incarnation
            self._core = SchedulerConnector(
                settings.config,
                engine_id=settings.engine_id,
                incarnation=incarnation,
                facts=facts,
                tp_size=settings.tp_size,
                pp_size=settings.pp_size,
                block_tokens=settings.block_tokens,
                layout=LAYOUT,
                can_send=settings.can_send,
                can_receive=settings.can_receive,
            )
        self._core.set_xfer_handshake_metadata_pp_aware(
            {key: said.manifest for key, said in known.items()}
        )

    # -------------------------------------------------- requests

    def on_new_request(self, request: Any) -> None:
        """A request has arrived. One that cannot be described is run plain, and counted."""
        if self._core is None or not request.kv_transfer_params:
            return
        view = view_request(request)
        if view.is_rejected:
            self._core.reject_request(view)
        elif view.has_embeddings:
            self._core.refuse_request(view, EMBEDDINGS, "its prompt is not only tokens")
        else:
            try:
                self._core.on_new_request(view)
            except (AttributeError, TypeError, ValueError) as e:
                # From whoever made the request: the engine must not end for it.
                self._core.refuse_request(view, Reason.BAD_PARAMS, str(e))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """(tokens that can be loaded beyond the local ones, whether that is asynchronous); changes
        nothing, and never (0, True).
        """
        if self._core is None or not request.kv_transfer_params:
            return 0, False
        num_tokens, is_async = self._core.get_num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens or 0, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated: the load goes to the workers, or the offer is given up."""
        if self._core is not None and request.kv_transfer_params:
            self._core.update_state_after_alloc(request, BlocksView(blocks), num_external_tokens)

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks stay until finished_sending, params for the decode side)."""
        if self._core is None or not request.kv_transfer_params:
            return False, None
        return self._core.request_finished_all_groups(
            view_request(request), without_null(block_ids)
        )

    def loaded_group_ids(self) -> tuple[int, ...]:
        """Every group is transferred."""
        return self._group_ids

    # -------------------------------------------------- steps

    def build_connector_meta(self, step: Any) -> KvxferMetadata:
        """This step's orders."""
        if self._core is None:
            raise ConfigError("connector: expected the ranks' handshake before the first step")
        return KvxferMetadata(
            orders=self._core.build_connector_meta(StepView(step)),
            is_idle=not step.total_num_scheduled_tokens,
        )

    def update_connector_output(self, output: Any) -> None:
        """What the ranks reported, aggregated."""
        if self._core is None:
            return
        said = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(said, KvxferWorkerMetadata):
            self._failures.update(said.failures)
        received = output.finished_recving or set()
        failed = self._failed(received, getattr(output, "failed_recving", None) or set())
        self._core.update_connector_output(
            KVConnectorOutput(
                finished_sending=output.finished_sending,
                finished_recving=received,
                failed_recving=failed,
            )
        )

    def _failed(self, received: set[str], failed: set[str]) -> dict[str, str]:
        """Why loads failed that are over on all ranks; one rank may have said so steps ago."""
        reasons = {i: self._failures.pop(i) for i in received if i in self._failures}
        return reasons | {i: Reason.READ_FAILED.value for i in failed if i not in reasons}

    def has_pending_push_work(self) -> bool:
        """Something waits for the next step: an idle engine must make one."""
        return self._core is not None and self._core.has_orders()

    def get_kv_connector_stats(self) -> KvxferStats | None:
        """Requests that were loaded, failed or ran plain, since the last call."""
        return None if self._core is None else of_scheduler(self._core.get_kv_connector_stats())

    def reset_cache(self) -> bool:
        """Break every offer."""
        if self._core is not None:
            self._core.reset_cache()
        return True

    def shutdown(self) -> None:
        """Nothing is held here. Idempotent."""
        if self._core is not None:
            self._core.shutdown()


def _ours(key: tuple[int, int], said: object) -> KvxferHandshake:
    if not isinstance(said, KvxferHandshake):
        raise ConfigError(
            f"rank pp{key[0]}tp{key[1]}: expected kvxfer's handshake metadata, got "
            f"{type(said).__name__}; MultiConnector passes on that of its first connector only: "
            "put KvxferConnector before it"
        )
    return said
