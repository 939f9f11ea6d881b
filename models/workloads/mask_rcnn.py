"""Define VM: Mask R-CNN on one picture. Work depends on what it finds: many graph breaks, sizes read by the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.registry import Inputs, Sharding, Size, register

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return a list of one picture [3, 427, 640] (tiny: [3, 43, 64]), uniform in 0 .. 1 and, as a decoded picture is,
    with the channels next to one another in memory."""
    import torch

    height, width = (427, 640) if size == "full" else (43, 64)
    return Inputs(args=([torch.rand(height, width, 3, generator=generator).permute(2, 0, 1)],))


def sorted_scores(output: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return how sure the program is of each detection, in rising order: [detections] for each picture."""
    return [found["scores"].sort().values for found in output]


def _shard(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    from models.sharding.mask_rcnn import shard

    shard(module, mesh)


@register(
    acronym="VM",
    name="vision_maskrcnn",
    suite="torchbench",
    task="inference",
    batch=1,
    dtype_policy="fp16",
    sets=("grace", "pygraph"),
    inputs=inputs,
    compared=sorted_scores,
    sharding=Sharding(shard=_shard, batch=1, inputs=inputs),
    float32_on_cpu=True,
    parameters=44_454_513,
    notes="random weights, not those trained on COCO; it still finds its 100 objects. Detections are chosen among "
    "nearly equal ones, by rounding in the end, so that their sorted scores are compared with eager, and not boxes and "
    "masks. It keeps the anchors of its first call. If that is compiled with stock's CUDA graphs, a later call ends "
    "with an error; here the first call is not compiled, in any mode",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor

    if size == "full":
        return maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    return MaskRCNN(
        resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5),
        min_size=64,
        max_size=96,
        rpn_pre_nms_top_n_test=50,
        rpn_post_nms_top_n_test=20,
        box_head=TwoMLPHead(256 * 7**2, 32),
        box_predictor=FastRCNNPredictor(32, 5),
        mask_predictor=MaskRCNNPredictor(256, 16, 5),
        box_detections_per_img=4,
    )
