"""`MixerSpec`: a mixer of any kind."""

from typing import TYPE_CHECKING

from quire.config.layers.mixers import AttentionSpec, CompressedAttentionSpec, LatentAttentionSpec, Mixer
from quire.config.layers.recurrent_mixers import RecurrentSpec

if TYPE_CHECKING:
    MixerSpec = AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec | RecurrentSpec
else:
    MixerSpec = Mixer  # what messages are decoded by: a codec knows no union of dataclasses
"""The kinds of mixers that there are."""
