"""Distributed tracing: one OpenTelemetry trace per job, exported as OTLP over HTTP."""
