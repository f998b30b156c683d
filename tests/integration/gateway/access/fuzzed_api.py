"""Hooks of the API fuzzer: leaves out what an OpenAPI document cannot express."""

from typing import Any

import schemathesis

ENDLESS = ("/v1/stream", "/v1/nodes/{node_id}/connection")
WHOLE_LEDGER = (
    "/v1/projections/verify",
    "/v1/projections/rebuild",
    "/v1/replay",
    "/v1/estimator/models",
    "/v1/estimator/profile",
)
"""Answered by worker processes, in seconds; other tests ask for them."""

OF_JOBS = (
    "penstock.job.submitted.v1",
    "penstock.job.cancel_requested.v1",
    "penstock.job.hold_requested.v1",
    "penstock.job.release_requested.v1",
    "penstock.job.checkpoint_requested.v1",
)


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Without YAML job files, which are text, and binary mode, whose attributes are headers of this media
    type alone."""
    paths = raw_schema["paths"]
    for path in (*ENDLESS, *WHOLE_LEDGER):
        del paths[path]
    output = paths["/v1/jobs/{job_id}/logs"]["get"]
    output["parameters"] = [one for one in output["parameters"] if one["name"] != "follow"]
    submit = paths["/v1/jobs"]["post"]
    submit["parameters"] = [one for one in submit["parameters"] if one["in"] == "header"]  # workers, too
    del submit["requestBody"]["content"]["application/yaml"]
    del paths["/v1/events"]["post"]["requestBody"]["content"]["application/json"]
    event = raw_schema["components"]["schemas"]["CloudEvent"]  # rules of estimates and plans span fields
    event["oneOf"] = [kind for kind in event["oneOf"] if kind["properties"]["type"]["const"] in OF_JOBS]
