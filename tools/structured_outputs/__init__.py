"""Measure structured output on collections of JSON Schemas, whose data is no part of this repository.

    python -m tools.structured_outputs generate DIRECTORY [--limit N]    generate, and validate with jsonschema
    python -m tools.structured_outputs masks DIRECTORY [--limit N]       compare masks with instances that are labelled

DIRECTORY is a checkout of json-schema-org/JSON-Schema-Test-Suite (or one draft in it), or of
guidance-ai/jsonschemabench (`data`, or `maskbench/data`).
"""
