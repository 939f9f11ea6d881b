"""Define ST: Speech-Transformer on one bucket of ten utterances, which the papers call batch 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Sharding, Size, register

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from models.networks.speech_transformer import SpeechConfig

FRAME_LENGTHS = {"full": (204, 200, 196, 180, 147, 137, 129, 113, 105, 86), "tiny": (9, 7, 4)}
TEXT_LENGTHS = {"full": (21, 18, 17, 15, 12, 11, 10, 9, 9, 9), "tiny": (4, 5, 2)}
"""The published lengths; their order within the batch is not known for the texts."""


def _config(variant: str, size: Size) -> SpeechConfig:
    from models.networks.speech_transformer import SpeechConfig

    per_utterance = variant == "published"
    if size == "full":
        return SpeechConfig(per_utterance=per_utterance)
    return SpeechConfig(
        per_utterance=per_utterance,
        features=12,
        vocabulary=23,
        layers=2,
        heads=2,
        head_width=16,
        width=32,
        feedforward=64,
        longest=16,
    )


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return frames [10, 204, 320] (tiny: [3, 9, 12]) normal, zero after each utterance; their lengths [10] int64;
    texts [10, 21] (tiny: [3, 5]) int64, padded with -1."""
    import torch

    from models.networks.speech_transformer import PADDING

    config = _config(variant, size)
    frame_lengths, text_lengths = torch.tensor(FRAME_LENGTHS[size]), torch.tensor(TEXT_LENGTHS[size])
    times, places = torch.arange(max(FRAME_LENGTHS[size])), torch.arange(max(TEXT_LENGTHS[size]))
    utterances = len(FRAME_LENGTHS[size])
    frames = torch.randn(utterances, len(times), config.features, generator=generator)
    frames = frames.masked_fill((times >= frame_lengths[:, None])[..., None], 0.0)
    texts = torch.randint(config.eos + 1, config.vocabulary, (utterances, len(places)), generator=generator)
    texts = texts.masked_fill(places >= text_lengths[:, None], PADDING)
    return Inputs(args=(frames, frame_lengths, texts))


def _shard(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    from models.sharding.speech_transformer import shard

    shard(module, mesh)


@register(
    acronym="ST",
    name="speech_transformer",
    suite="torchbench",
    task="inference",
    batch=1,
    dtype_policy="bf16",
    sets=("grace", "pygraph"),
    inputs=inputs,
    sharding=Sharding(shard=_shard, batch=1, inputs=inputs),
    variants=("published", "current"),
    parameters=44_823_040,
    notes="published: numpy scalars in attention, lengths read by the host, texts cut out by masks. `encore explain` "
    "counts eight graph breaks and six graphs in its first call, with PyTorch 2.11: four where Dynamo breaks at a "
    "length, one for the loop over lengths that it leaves to Python, three where a text is cut out (TorchBench's code, "
    "with one more function around two masks, has two more at lengths, and seven graphs). On an H200 kernels take 1.2 "
    "of the 3.1 ms that an iteration takes with CUDA graphs, the rest is the host's, in Python between the graphs (run "
    "20261120-140122-h200); current: one graph and no break, with Python floats and masks made on the device",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.speech_transformer import SpeechTransformer

    return SpeechTransformer(_config(variant, size))
