"""The table of GPU products, with published figures.

Rates are the vendor's dense rates at boost clock (no structured sparsity), with tensor cores accumulating in fp32. The
share that kernels reach is in the cost model's constants (``kernels/cost.py``).
"""

from __future__ import annotations

from ..artifacts.records import Gpu
from ..artifacts.tuples import NamedTuple
from .arch import arch_of


class Chip(NamedTuple):
    """A GPU product. ``names`` are torch.cuda.get_device_name's without "NVIDIA ".

    ``bf16_tflops`` holds for fp16 too. ``source`` names the public document of the figures.
    """

    name: str
    names: tuple[str, ...]
    sm: int
    sm_count: int
    bf16_tflops: float
    tf32_tflops: float
    fp32_tflops: float
    bandwidth_gbs: float
    memory_gib: int
    l2_mib: int
    source: str

    @property
    def clock_ghz(self) -> float:
        """The boost clock, computed from the published fp32 rate."""
        return self.fp32_tflops * 1e3 / (self.sm_count * 2 * arch_of(self.sm).limits.fp32_lanes)

    def with_sm_count(self, sm_count: int) -> Chip:
        """Return this chip with another number of SMs: rates scale, the memory stays.

        Raises
        ------
        ValueError
            if ``sm_count`` is not positive.
        """
        if sm_count < 1:
            raise ValueError(f"{self.name}: sm_count is {sm_count}, wanted at least 1")
        if sm_count == self.sm_count:
            return self
        scale = sm_count / self.sm_count
        return self._replace(
            sm_count=sm_count,
            bf16_tflops=self.bf16_tflops * scale,
            tf32_tflops=self.tf32_tflops * scale,
            fp32_tflops=self.fp32_tflops * scale,
        )


_A100 = "NVIDIA A100 Tensor Core GPU datasheet and architecture whitepaper"
_ORIN = "NVIDIA Jetson AGX Orin technical brief (fp16 as half of its 85 dense INT8 TOPS)"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet"
_B300 = "NVIDIA HGX B300 datasheet; SM count and L2 as the driver reports them"
_GB300 = "NVIDIA GB300 NVL72 datasheet; SM count and L2 as the driver reports them"
_GB10 = "NVIDIA DGX Spark datasheet (bf16 as an eighth of its 1 PFLOP/s sparse FP4)"
_RTX_PRO_6000 = ("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Server Edition")
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper"
_BLACKWELL = "NVIDIA Blackwell architecture technical brief; SM count and L2 as the driver reports them"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"

# chip_for(sm) returns a capability's first row, its representative.
CHIPS: tuple[Chip, ...] = (
    # name, torch names, sm, SMs, bf16, tf32, fp32 TFLOP/s, GB/s, GiB, L2 MiB, source
    Chip("A100 80GB SXM", ("A100-SXM4-80GB",), 80, 108, 312, 156, 19.5, 2039, 80, 40, _A100),
    Chip("A100 80GB PCIe", ("A100 80GB PCIe",), 80, 108, 312, 156, 19.5, 1935, 80, 40, _A100),
    Chip("A100 40GB", ("A100-SXM4-40GB", "A100-PCIE-40GB"), 80, 108, 312, 156, 19.5, 1555, 40, 40, _A100),
    Chip("A30", ("A30",), 80, 56, 165, 82, 10.3, 933, 24, 24, "NVIDIA A30 datasheet; L2 as the driver reports it"),
    Chip("A40", ("A40",), 86, 84, 149.7, 74.8, 37.4, 696, 48, 6, "NVIDIA A40 datasheet"),
    Chip("RTX A6000", ("RTX A6000",), 86, 84, 154.8, 77.4, 38.7, 768, 48, 6, _GA102),
    Chip("A10", ("A10", "A10G"), 86, 72, 125, 62.5, 31.2, 600, 24, 6, "NVIDIA A10 datasheet"),
    Chip("RTX 3090", ("GeForce RTX 3090",), 86, 82, 71, 35.6, 35.6, 936, 24, 6, _GA102),
    Chip("Jetson AGX Orin 64GB", ("Orin",), 87, 16, 42.6, 21.3, 5.3, 204.8, 64, 4, _ORIN),
    Chip("L40S", ("L40S",), 89, 142, 362, 183, 91.6, 864, 48, 96, "NVIDIA L40S datasheet"),
    Chip("L40", ("L40",), 89, 142, 181, 90.5, 90.5, 864, 48, 96, "NVIDIA L40 datasheet"),
    Chip("L4", ("L4",), 89, 58, 121, 60, 30.3, 300, 24, 48, "NVIDIA L4 datasheet"),
    Chip("RTX 6000 Ada", ("RTX 6000 Ada Generation",), 89, 142, 364.2, 182.1, 91.1, 960, 48, 96, _ADA),
    Chip("RTX 4090", ("GeForce RTX 4090",), 89, 128, 165.2, 82.6, 82.6, 1008, 24, 72, _ADA),
    # H100 SXM represents sm_90: it is the most common one, and its bandwidth is a careful guess for an H200.
    Chip("H100 SXM", ("H100 80GB HBM3", "H800"), 90, 132, 989.4, 494.7, 66.9, 3350, 80, 50, _H100),
    Chip("H100 NVL", ("H100 NVL",), 90, 132, 835, 417.5, 60, 3900, 94, 50, _H100),
    Chip("H100 PCIe", ("H100 PCIe", "H800 PCIe"), 90, 114, 756, 378, 51.2, 2039, 80, 50, _H100),
    Chip("H200", ("H200",), 90, 132, 989.4, 494.7, 66.9, 4800, 141, 60, "NVIDIA H200 datasheet; L2 as the driver says"),
    Chip("GH200 96GB", ("GH200 480GB",), 90, 132, 989.4, 494.7, 66.9, 4000, 96, 60, _GH200),
    Chip("GH200 144GB", ("GH200 144G HBM3e",), 90, 132, 989.4, 494.7, 66.9, 4900, 144, 60, _GH200),
    Chip("B200", ("B200",), 100, 148, 2250, 1125, 75, 7700, 180, 126, _BLACKWELL),
    Chip("GB200", ("GB200",), 100, 152, 2500, 1250, 80, 8000, 186, 126, _BLACKWELL),
    Chip("B300", ("B300 SXM6 AC",), 103, 148, 2250, 1125, 75, 8000, 288, 126, _B300),
    Chip("GB300", ("GB300",), 103, 152, 2500, 1250, 80, 8000, 288, 126, _GB300),
    Chip("RTX PRO 6000 Blackwell", _RTX_PRO_6000, 120, 188, 503.8, 251.9, 126, 1792, 96, 128, _RTX_BLACKWELL),
    Chip("RTX 5090", ("GeForce RTX 5090",), 120, 170, 209.5, 104.8, 104.8, 1792, 32, 96, _RTX_BLACKWELL),
    Chip("GB10", ("GB10",), 121, 48, 125, 62.5, 31, 273, 128, 24, _GB10),
)

_BY_NAME = {name.casefold(): chip for chip in CHIPS for name in chip.names}
_BY_SM = {chip.sm: chip for chip in reversed(CHIPS)}


def chip_for(sm: int) -> Chip:
    """Return the representative GPU of capability ``sm``, for use if only the capability is known.

    Raises
    ------
    LookupError
        if ``sm`` is not in the table; the message lists the capabilities that are.
    """
    arch_of(sm)
    return _BY_SM[sm]


def chip_of(gpu: Gpu, sm: int) -> Chip:
    """Return a GPU's figures, or if it is not in the table those of ``chip_for(sm)``, scaled to the GPU's SMs."""
    named = chip_named(gpu.name)
    chip = named if named is not None and named.sm == sm else chip_for(sm)
    return chip.with_sm_count(gpu.sm_count)


def chip_named(device_name: str) -> Chip | None:
    """Return the chip with torch's or the driver's ``device_name``, None if it is not in the table.

    The whole name must match, because a GeForce RTX 4090 D or a MIG slice is not the chip that its name begins with.
    """
    return _BY_NAME.get(device_name.strip().casefold().removeprefix("nvidia ").strip())
