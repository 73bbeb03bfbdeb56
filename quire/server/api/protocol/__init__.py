"""What clients send and get: requests as pydantic models (strict, unknown fields kept), replies as typed dicts.

Models check kinds only. Ranges are checked where every way into the engine checks them, in `SamplingParams`.
"""
