"""Write a status also where the CRD in the hub is of another version than this operator.

An older CRD lacks a field, and then the API server refuses the whole apply; a newer one may take other values. What it
does not take is left out, and the rest is written with a condition that says so. Where nothing can be written, because
a newer CRD asks for a field that this version does not know, an Event says it instead. Every look tries the whole
status first, so that nothing has to be started again once the CRD fits.
"""

import logging
import re
from dataclasses import replace

from prfaas.errors import PrfaasError
from prfaas_operator.clusters.api import Object
from prfaas_operator.errors import InvalidObjectError, ServerFailedError
from prfaas_operator.plan.conditions import no
from prfaas_operator.reconcile import events, status
from prfaas_operator.reconcile.runtime import RESYNC_SECONDS, Report, Runtime
from prfaas_operator.reconcile.wakers import Ref

log = logging.getLogger(__name__)

CRD_FITS = "CRDFits"
MISMATCH = "CRDMismatch"


async def write(runtime: Runtime, ref: Ref, live: Object, report: Report) -> Report:
    """Write a status as far as the hub's CRD takes it; return what was written, with when to look again.

    Raises:
        PrfaasError: nothing could be written.

    """
    left_out: set[str] = set()
    while True:
        try:
            await status.write(runtime.hub, ref.kind, live, report)
        except (InvalidObjectError, ServerFailedError) as error:
            refused = set(re.findall(r"\bstatus\.(\w+)", str(error)))
            more = refused & set(status.OWN_FIELDS[ref.kind]) - left_out
            if refused and not left_out:
                await _tell(runtime, ref, live, message := _message(ref, error))
                report = replace(report, conditions={**report.conditions, CRD_FITS: no(MISMATCH, message)})
            if not more:
                raise
            left_out |= more
            again_seconds = min(report.again_seconds or RESYNC_SECONDS, RESYNC_SECONDS)
            fields = {**report.fields, **dict.fromkeys(left_out)}
            report = replace(report, fields=fields, again_seconds=again_seconds)
        else:
            if not left_out:
                runtime.misfits.pop(ref, None)
            return report


def _message(ref: Ref, error: PrfaasError) -> str:
    return (
        f"the CRD of {ref.kind.name} in the hub is of another version than this operator: {error}; "
        "apply the CRDs of the operator's version, see `prfaas cluster check`"
    )


async def _tell(runtime: Runtime, ref: Ref, live: Object, message: str) -> None:
    """Post an Event once, until something else is wrong."""
    if runtime.misfits.get(ref) != message:
        runtime.misfits[ref] = message
        log.warning("%s: %s", ref, message)
        await events.post(runtime.hub, live, "Warning", MISMATCH, message)
