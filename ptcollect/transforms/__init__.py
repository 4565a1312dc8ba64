"""Transforms: functions from pipelines to pipelines, one a file."""
