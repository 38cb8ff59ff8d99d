"""The quantised weights of a layer's experts as one object, which ``grouped_gemm`` and ``moe_mlp`` take as w."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import PRECISIONS, DType, Precision, dtypes_of
from ..settings import lock
from .validate import (
    as_bytes,
    bad,
    check_finite,
    check_flag,
    described,
    fit,
    flat,
    nan_among,
    of_dtype,
    overlap,
    place_of_nan,
)

if TYPE_CHECKING:
    from .codes import Quantised
    from .prepared_layout import CodeOrder

_SCALE_DTYPES = {
    "fp32": (torch.float32,),
    "e8m0": (torch.uint8,),
    "e4m3": (torch.float8_e4m3fn,),
    "bf16": (torch.bfloat16, torch.float16, torch.float32),
}
_GROUPS = (32, 64, 128)  # group sizes of int4
_MOST_SCALES = "mxfp4's up to 2, mxfp8's up to 128, int4's below 1,024: keep the checkpoint's layout"
_ZEROS = "0 to 15: keep the checkpoint's layout"
_NUMBERS = "numbers: kernels read NaN as 480 from prepared codes. Keep the checkpoint's layout, or mend the checkpoint"

_log = logging.getLogger(__name__)


class ExpertWeights:
    """w[e] = (codes[e] - zero[e]) * (scale[e] * global_scale[e]): E matrices [N, K], each multiplied as x @ w[e].T.

    Made by ``fp8_block``, ``fp8_channel``, ``mxfp8``, ``mxfp4``, ``int4`` and ``nvfp4`` of tensors in these shapes,
    which are not copied and belong to it from then on; by ``from_tensors`` of tensors as a checkpoint names and packs
    them; or by ``quantize``. It is frozen: it has no gradient. No call changes its tensors, but ``copy_`` and
    ``refresh``.

    Attributes
    ----------
    format
        A name of ``pretuned.artifacts.PRECISIONS``, which says what codes and scales are, and whether x is quantised.
    codes
        In the checkpoint's layout [E, N, K] float8_e4m3fn, or [E, N, K/2] uint8 with two codes a byte, the low four
        bits first. Prepared, as ``prepare`` makes them, int32 [E, N/64, K/64, 64, 4, words].
    scale
        One for each block of the format: [E, ceil(N/128), ceil(K/128)], [E, N] or [E, N, ceil(K/group)]. Beside
        prepared codes those of groups are [E, N/64, blocks of K, 64, groups of a block].
    zero
        uint8 in scale's shape: what code stands for 0. None: 8 for int4; the others have none. Prepared, int8 in the
        shape of prepared scales, less 8.
    global_scale
        [E] float32 of nvfp4, else None.
    derived
        The scales that kernels read where they read none of ``scale``'s dtype or layout, made of it; None before they
        are needed.

    always_quantises
        True if every product on ``cuda`` is to quantise x, also where a kernel with bf16 x is faster: in training in
        fp8, whose forward and dX have one equation whatever the number of rows.

    Kernels for prepared codes read ``kernel_scale``, portable ones ``plain_scale``: ``scale`` or ``derived``. Both
    multiply their sums by ``outer_scale``.
    """

    always_quantises = False

    def __init__(
        self,
        format: str,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        derived: torch.Tensor | None = None,
    ) -> None:
        """Store the tensors unchecked; ``checked`` checks them."""
        self.format, self.codes, self.scale, self.zero, self.global_scale = format, codes, scale, zero, global_scale
        self.derived = derived
        self._derived_of = (
            scale,
            None if derived is None else version_of(scale),
        )  # the scale that ``derived`` was computed from, and its version

    @classmethod
    def fp8_block(cls, codes: torch.Tensor, scale: torch.Tensor, *, quantize_x: bool = True) -> ExpertWeights:
        """fp8 with a scale for each 128 x 128: ``weight`` and ``weight_scale_inv`` of DeepSeek-V3, stacked.

        codes [E, N, K] float8_e4m3fn, scale [E, ceil(N/128), ceil(K/128)] float32. With ``quantize_x`` x is quantised,
        too (w8a8): to e4m3, with a scale for each row and 128 of K.

        Raises
        ------
        InputError
            for a wrong shape, dtype, device or stride, or a scale that is NaN or infinite.
        """
        check_flag("quantize_x", quantize_x)
        return checked(cls("fp8_block" if quantize_x else "fp8_block_a16", codes, scale))

    @classmethod
    def fp8_channel(cls, codes: torch.Tensor, scale: torch.Tensor, *, quantize_x: bool = True) -> ExpertWeights:
        """fp8 with a scale for each row of w: codes [E, N, K] float8_e4m3fn, scale [E, N] float32.

        With ``quantize_x`` x is quantised, too (w8a8): to e4m3, with a scale a row.

        Raises
        ------
        InputError
            for a wrong shape, dtype, device or stride, or a scale that is NaN or infinite.
        """
        check_flag("quantize_x", quantize_x)
        return checked(cls("fp8_channel" if quantize_x else "fp8_channel_a16", codes, scale))

    @classmethod
    def mxfp8(cls, codes: torch.Tensor, scale: torch.Tensor) -> ExpertWeights:
        """w[e, n, k] = codes[e, n, k] * 2**(scale[e, n, k // 32] - 127): e4m3 in groups of 32 of K, e8m0 scales.

        codes [E, N, K] float8_e4m3fn, scale [E, N, ceil(K/32)] uint8 (or float8_e8m0fnu); a scale of 255 is NaN. x
        stays in its type.

        Raises
        ------
        InputError
            for a wrong shape, dtype, device or stride.
        """
        return checked(cls("mxfp8", codes, as_bytes(scale)))

    @classmethod
    def mxfp4(cls, codes: torch.Tensor, scale: torch.Tensor) -> ExpertWeights:
        """e2m1 in groups of 32: codes [E, N, K/2] or (gpt-oss) [E, N, K/32, 16] uint8, the low nibble first.

        scale [E, N, ceil(K/32)] uint8 (or float8_e8m0fnu): e8m0, 2**(scale - 127); 255 is NaN.

        Raises
        ------
        InputError
            for a wrong shape, dtype, device or stride.
        """
        return checked(cls("mxfp4", flat(codes), as_bytes(scale)))

    @classmethod
    def int4(cls, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> ExpertWeights:
        """w = (code - zero) * scale in groups of 32, 64 or 128 of K; without zero points zero is 8.

        codes [E, N, K/2] uint8, the low nibble first; scale [E, N, ceil(K/group)] bfloat16, float16 or float32; zero
        uint8 in scale's shape. The shapes decide the group.

        Raises
        ------
        InputError
            for a wrong shape, dtype, device or stride, or a scale that is NaN or infinite.
        """
        return checked(cls(int4_format(codes, scale, zero), codes, scale, zero))

    @classmethod
    def nvfp4(cls, codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> ExpertWeights:
        """w = code * (scale * global_scale), e2m1 in groups of 16: codes [E, N, K/2] uint8, the low nibble first.

        scale [E, N, ceil(K/16)] float8_e4m3fn; global_scale [E] float32, which is multiplied (modelopt's
        ``weight_scale_2``; the inverse of compressed-tensors' ``weight_global_scale``). x stays in its type.

        Raises
        ------
        InputError
            for a wrong shape, dtype, device or stride, or a scale that is NaN or infinite.
        """
        return checked(cls("nvfp4", codes, scale, None, global_scale))

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        quantization_config: Mapping[str, Any],
        part: str | None = None,
        *,
        quantize_x: bool | None = None,
    ) -> ExpertWeights:
        """Return the weights of one product from a layer's tensors, as a checkpoint names and packs them.

        Parameters
        ----------
        tensors
            By their names: ``...experts.0.gate_proj.weight_scale_inv`` and so on, each expert's own or all stacked, or
            the last word alone of stacked ones. Others of the layer are passed over. Copied where they are stacked or
            packed otherwise, expert by expert; gpt-oss's are used as they are.
        quantization_config
            Of the checkpoint's config.json (the whole of it will do), or its hf_quant_config.json: ``fp8``, ``mxfp4``,
            ``mxfp8``, ``compressed-tensors``, ``gptq``, ``awq``, ``auto-round`` and ``modelopt``.
        part
            ``"gate_up"`` (the rows of gate, then those of up) or ``"down"``; needed where ``tensors`` has both.
        quantize_x
            Whether fp8 products quantise x. None: what the config says.

        Raises
        ------
        InputError
            for a format that is not among these, a tensor that is missing or does not fit, more than one layer.
        """
        from . import checkpoints  # here, as a process that builds weights from codes does not need it

        if quantize_x is not None:
            check_flag("quantize_x", quantize_x, " or None")
        format, parts = checkpoints.read(tensors, quantization_config, part, quantize_x)
        return checked(cls(format if format != "int4" else int4_format(*parts[:3]), *parts))

    @classmethod
    def quantize(
        cls, w: torch.Tensor, format: str, out: ExpertWeights | None = None, *, check: bool = True
    ) -> ExpertWeights:
        """Quantise w [E, N, K], floating point and finite: each number becomes a format's nearest code.

        Parameters
        ----------
        w
            In any floating-point dtype. bf16, fp16 and fp32 on a GPU are quantised by a bundle's row kernels.
        format
            A name of ``PRECISIONS``.
        out
            Weights of this format and shape, in either layout, to write to: as ``out.copy_(w)``. None: new ones, in
            the checkpoint's layout.
        check
            Whether w is read beforehand, once more, for NaN and infinity.

        Raises
        ------
        InputError
            for what is no such w, and what ``copy_`` refuses; nothing was written then.
        """
        check_flag("check", check)
        precision = _precision(format)
        if out is not None:
            if not isinstance(out, ExpertWeights) or out.format != format:
                raise bad("out", repr(out), f"{format} weights")
            return out.copy_(w, check=check)
        from . import writing  # here, as most processes have no quantised weights

        w = writing.check_plain(format, w)
        scale = precision.w.scale
        if scale is None:
            raise AssertionError(f"{format} has no scale")
        if check and not w.is_meta:
            writing.check_numbers(format, w, torch.bfloat16, prepared=False)
        E, N, K = w.shape
        tensors = writing.empty(format, E, N, K, w.device)
        if not w.is_meta:
            writing.quantise_into(format, tensors, w, prepared=False)
        weights = cls(format, *tensors)
        return checked(weights) if check else weights

    @classmethod
    def from_state_dict(cls, format: str, state: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """Return the weights of a state that ``state_dict`` returned, with their ``format``.

        Raises
        ------
        InputError
            for a state with missing or other tensors, or tensors that do not fit the format.
        """
        tensors = dict(state)
        number = torch.as_tensor(tensors.pop("order", torch.zeros((), dtype=torch.int64, device="cpu")))
        if number.dtype is torch.bool or number.dim():
            raise bad("order", described(number), "a number, as state_dict has it")
        try:
            weights = cls(format, **tensors)
        except TypeError:
            raise bad(
                "the state",
                f"of {sorted(state)}",
                "codes, scale, order and, where the format has them, zero and global_scale",
            ) from None
        checked(weights)
        weights._check_order(int(number))
        return weights

    @property
    def precision(self) -> Precision:
        """The format's row of ``PRECISIONS``."""
        return PRECISIONS[self.format]

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        if self.is_prepared:
            E, row_blocks, column_blocks = self.codes.shape[:3]
            return torch.Size((E, row_blocks * 64, column_blocks * 64))
        E, N, last = self.codes.shape
        return torch.Size((E, N, last * 8 // self.precision.w.bits))

    @property
    def is_prepared(self) -> bool:
        """True if the codes are in the layout that ``prepare`` makes: int32 of 6 dimensions."""
        return self.codes.dtype is torch.int32

    @property
    def can_be_prepared(self) -> bool:
        """True if ``prepare`` would change the layout. Takes the time to read the weights once."""
        order = None if self.is_prepared else _orders().get(self.format)
        wrong = None if order is None else order.misfits(self._quantised)
        return wrong is not None and not _is_any([*wrong, *_nan_among(self)])

    @property
    def order(self) -> int:
        """The number of the layout of the codes: 0 is the checkpoint's."""
        return _order_of(self).number if self.is_prepared else 0

    @property
    def requires_grad(self) -> bool:
        """False: quantised weights are frozen."""
        return False

    @property
    def device(self) -> torch.device:
        """The device of all its tensors."""
        return self.codes.device

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, expert: int | None = None) -> torch.Tensor:
        """Return w [E, N, K], or [N, K] of one ``expert``, in ``dtype``: computed in float32 and rounded once.

        Raises
        ------
        InputError
            if there is no such ``expert``.
        """
        E, N, K = self.shape
        if expert is not None:
            if not -E <= expert < E:
                raise bad("expert", f"{expert}", f"one of the {E} that there are")
            return self._values(expert).to(dtype)
        from . import writing

        w = torch.empty((E, N, K), dtype=dtype, device=self.device)
        if self._has_own_scales and writing.by_kernel(self.format, self._quantised, w, prepared=self.is_prepared):
            return w
        for e in range(E):
            w[e] = self._values(e)
        return w

    @property
    def _has_own_scales(self) -> bool:
        """True if scales are in the layout of the codes, or if that layout leaves scales as they are."""
        return not self.is_prepared or _order_of(self).prepared_scale is None or _moved(_order_of(self), self.scale)

    def prepare(self) -> ExpertWeights:
        """Return the same weights in the layout that the fastest kernels read, and release these.

        The new tensors are made expert by expert and are whole on the GPU when this returns, for any thread and stream.
        From then on these weights can't be used: any call with them raises InputError, and a second ``prepare`` returns
        what the first returned. ``restore`` gives the checkpoint's layout again.

        Weights that no kernel reads in another layout are returned as they are: N or K that are no multiples of 64 (of
        128 where a scale is of so many), a scale above 2 of mxfp4, above 128 of mxfp8 or of 1,024 and more of int4, or
        a zero point of 16.

        So are weights with NaN among their e4m3 codes, and a warning says where it is. The fast kernels read such a
        code as 480, the others as NaN. They are not refused, because an expert that gets no tokens (padding, memory
        that an engine has yet to fill) may hold any bytes. Once all codes are numbers, call ``prepare`` again.

        Raises
        ------
        InputError
            in the capture of a CUDA graph.
        """
        from . import writing

        move = writing.mover(self.format, self.__dict__.get("codes"))  # before the lock: to find it may test code
        with lock("prepare"):
            earlier: ExpertWeights | None = self.__dict__.get("_prepared")
            if earlier is not None:
                return earlier
            order = _orders().get(self.format)
            if order is None or self.is_prepared:
                return self
            if is_captured(self.codes):
                raise InputError(
                    "ExpertWeights: prepare() in the capture of a CUDA graph, which would read released "
                    "tensors: call it before the capture"
                )
            wrong = order.misfits(self._quantised)
            if wrong is None:
                return self
            with torch.inference_mode(False), torch.no_grad():
                nan: list[torch.Tensor] = []
                codes = writing.moved_codes(self.format, self.codes, move, nan)
                moves = order.prepared_scale is not None and order.moves(self.scale)
                scale = writing.moved_scale(self.format, self.scale) if moves else self.scale
                zero = None if self.zero is None else writing.moved_scale(self.format, self.zero)
            prepared = ExpertWeights(self.format, codes, scale, zero, self.global_scale)
            prepared._derive(anew=True)  # now: a graph capture can't
            if _is_any([*wrong, *nan]):  # last, as it waits for the device
                if _is_any(nan):
                    self._log_nan()
                return self
            released, self.__dict__ = self.__dict__, {"format": self.format, "_prepared": prepared}
            synchronize(codes)  # also waits for calls that read the old tensors, before their memory is reused
            del released
            return prepared

    def prepare_in_place(self) -> ExpertWeights:
        """Prepare the weights in the memory of these tensors, if nobody else uses them and there is no room for a copy.

        Their dtypes and shapes stay, and what is in them is no longer what these say.
        """
        order = _orders().get(self.format)
        wrong = None if order is None or self.is_prepared else order.misfits(self._quantised)
        if order is None or wrong is None or _is_any(wrong):
            return self
        try:
            return self._rewritten(moved=order.prepared_scale is not None and order.moves(self.scale))
        except _NanError:
            self._log_nan()
            return self

    def restore_in_place(self) -> ExpertWeights:
        """Restore the checkpoint's layout in the memory of these tensors."""
        if not self.is_prepared:
            return self
        return self._rewritten(moved=_moved(_order_of(self), self.scale))

    def _rewritten(self, *, moved: bool) -> ExpertWeights:
        """These tensors in the other layout, written over themselves; the scales if they are ``moved``."""
        from . import writing
        from .prepared_layout import rewriting

        nan: list[torch.Tensor] = []
        by = writing.mover(self.format, self.codes)
        of_codes = (
            partial(writing.codes_room, self.format),
            partial(writing.move_codes, self.format, by=by, nan=None if self.is_prepared else nan),
        )
        of_scale = partial(writing.scale_room, self.format), partial(writing.move_scale, self.format)
        codes, scale, zero = self.codes, self.scale, self.zero
        with torch.inference_mode(codes.is_inference()), torch.no_grad(), rewriting() as rewrite:
            codes = rewrite(codes, *of_codes)
            if _is_any(nan):
                raise _NanError
            scale = rewrite(scale, *of_scale) if moved else scale
            zero = None if zero is None else rewrite(zero, *of_scale)
            rewritten = ExpertWeights(self.format, codes, scale, zero, self.global_scale)
            if rewritten.is_prepared:
                rewritten._derive(anew=True)
        synchronize(codes)
        return rewritten

    def restore(self) -> ExpertWeights:
        """Return these weights in the checkpoint's layout, bit for bit: a copy of prepared ones, which stay usable."""
        if not self.is_prepared:
            return self
        from . import writing

        order = _order_of(self)
        with torch.inference_mode(False), torch.no_grad():
            codes = writing.moved_codes(self.format, self.codes, writing.mover(self.format, self.codes))
            scale = writing.moved_scale(self.format, self.scale) if _moved(order, self.scale) else self.scale
            zero = None if self.zero is None else writing.moved_scale(self.format, self.zero)
        return ExpertWeights(self.format, codes, scale, zero, self.global_scale)

    def copy_(self, other: ExpertWeights | torch.Tensor, *, check: bool = True) -> ExpertWeights:
        """Write the numbers of ``other`` into these tensors, in the layout that they have. Returns these weights.

        Addresses stay, so a captured graph reads the new numbers. The copy runs on the current stream.

        Parameters
        ----------
        other
            Weights of this format in either layout, or w [E, N, K] of a floating-point type, which is quantised. On any
            device.
        check
            Whether ``other`` is read beforehand: w for NaN and infinity; of weights that are copied into prepared ones
            the scales and, if they are not prepared, the codes. This waits for its device. The capture of a graph can't
            wait: there prepared weights are not read, and others and w need ``check=False``.

        Raises
        ------
        InputError
            for another format, shape or dtype, memory of these weights, NaN, infinity and, if these weights are
            prepared, scales, zero points or codes that kernels would read as other numbers; nothing was written then.
        """
        from . import writing

        check_flag("check", check)
        if not isinstance(other, ExpertWeights):
            self._quantise(other, check=check)
            return self
        if (other.format, other.shape) != (self.format, self.shape):
            raise bad("copy_'s argument", repr(other), f"{self.format} of shape {list(self.shape)}")
        if other.codes.is_meta:
            raise bad("copy_'s argument", "on meta, without numbers", "weights on a device")
        if self.scale.dtype is not other.scale.dtype:
            raise bad("scale", f"{other.scale.dtype}", f"{self.scale.dtype}, as these weights have it")
        tensors = other.tensors()
        if any(
            mine.dim() != tensors[name].dim() and overlap(mine, tensors[name]) for name, mine in self.tensors().items()
        ):
            raise bad("copy_'s argument", "in the memory of these weights", "prepare_in_place() or restore_in_place()")
        captured = is_captured(other.codes) or is_captured(self.codes)
        if check and self.is_prepared and captured and not other.is_prepared:
            raise bad("copy_'s argument", f"{other} in the capture of a CUDA graph", "check=False there")
        if check and self.is_prepared and not captured:
            _check_numbers(other, codes=not other.is_prepared)  # prepared codes were checked before
        for name, mine in self.tensors().items():
            if name == "codes":
                writing.move_codes(self.format, tensors[name], mine, writing.mover(self.format, mine))
            else:
                writing.move_scale(self.format, tensors[name], mine)
        if self.derived is not None:
            self._derive(anew=True)
        return self

    def _quantise(self, w: torch.Tensor, *, check: bool) -> None:
        """Write w, quantised, into these tensors."""
        from . import writing

        w = writing.check_plain(self.format, w, self.shape)
        if any(overlap(w, mine) for mine in self.tensors().values()):
            raise bad("w", "in the memory of these weights", "memory of its own")
        if check:
            if is_captured(w) or is_captured(self.codes):
                raise bad("w", "copied in the capture of a CUDA graph, which can't be checked", "check=False there")
            writing.check_numbers(self.format, w, self.scale.dtype, prepared=self.is_prepared)
        writing.quantise_into(self.format, self._quantised, w, prepared=self.is_prepared)
        if self.derived is not None:
            self._derive(anew=True)

    def refresh(self) -> ExpertWeights:
        """Check what was written to prepared weights, and make ``derived`` anew. Returns these weights.

        Needed after writes that torch does not count: through ``.data``, by a kernel of your own, or to tensors made
        in inference mode. Of writes that torch counts the next call makes ``derived`` anew, but checks nothing.

        The check reads the weights once and waits for their device; in the capture of a graph there is none.

        Raises
        ------
        InputError
            for scales, zero points and e4m3 codes beside prepared codes that kernels would read as other numbers.
        """
        if self.is_prepared and not is_captured(self.codes):
            _check_numbers(self, codes=True)
        if self.derived is not None:
            self._derive(anew=True)
            synchronize(self.derived)
        return self

    @property
    def kernel_scale(self) -> torch.Tensor | None:
        """The scales in blocks that kernels read of prepared weights; None where they read none."""
        order = _order_of(self)
        if _moved(order, self.scale) and order.moves(self.scale):
            return self.scale
        return None if order.derived is None else self._derive()

    @property
    def plain_scale(self) -> torch.Tensor | None:
        """The scales that portable kernels read: ``scale``, or ``scale`` in bf16 for kernels that read only bf16."""
        if not self._reads_bf16:
            return self.scale
        if self.is_prepared:
            return self.kernel_scale
        return self.scale if self.scale.dtype is torch.bfloat16 else self._derive()

    def derived_now(self) -> torch.Tensor | None:
        """Scales like ``derived``, computed from the current ``scale``; None where kernels read ``scale`` itself."""
        if self.is_prepared:
            order = _order_of(self)
            if order.derived is None or (_moved(order, self.scale) and order.moves(self.scale)):
                return None
            return order.derived(self.scale)
        other = self._reads_bf16 and self.scale.dtype is not torch.bfloat16
        return self.scale.to(torch.bfloat16) if other else None

    @property
    def _reads_bf16(self) -> bool:
        """True if kernels read scales in bf16, whatever dtype the checkpoint has them in."""
        scale = self.precision.w.scale
        return scale is not None and scale.name == "bf16"

    def _derive(self, *, anew: bool = False) -> torch.Tensor | None:
        """``derived``, which is made or written anew if ``scale`` was written to since.

        With ``anew`` the caller has checked the scale, and orders other streams after this one.
        """
        if self.derived is not None and not anew and self._is_current():
            return self.derived
        with lock("prepare"):
            if self.derived is not None and not anew and self._is_current():
                return self.derived
            source = self.scale, version_of(self.scale)
            was_derived = self.derived is not None
            if was_derived and not anew and self.is_prepared and not _order_of(self).room(self.scale):
                raise bad("scale", "too large for prepared codes", _MOST_SCALES)
            capturing = is_captured(self.scale)
            with torch.inference_mode(self.derived is not None and self.derived.is_inference()), torch.no_grad():
                scales = self.derived_now()
                if scales is None or (capturing and self.derived is None):
                    return scales  # in a capture: a part of the graph
                if self.derived is not None:
                    self.derived.copy_(scales)
            if not capturing:  # a capture has not written it yet: the next call does
                if not anew:
                    synchronize(scales)  # before a thread on another stream can see it
                self._derived_of = source
            if self.derived is None:
                self.derived = scales
            return self.derived

    def _is_current(self) -> bool:
        scale, version = self._derived_of
        return scale is self.scale and version == version_of(scale)

    @property
    def kernel_dtypes(self) -> tuple[DType, ...]:
        """The dtypes that a bundle's problems with these weights can have: ``precision.dtypes_of``."""
        return dtypes_of(self.format)

    @property
    def outer_scale(self) -> torch.Tensor | None:
        """The scales that kernels multiply sums by: [E] for each expert, [E, N] for each column of y, or None."""
        return self.scale if self.scale.dim() == 2 else self.global_scale

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> ExpertWeights:
        """Return the weights on a device, themselves if they are there. ``non_blocking`` is ``Tensor.to``'s.

        Raises
        ------
        InputError
            for a dtype: a format has its own.
        """
        if not isinstance(device, (torch.device, str, int)):
            raise bad("the argument of to()", repr(device), "a device")
        if self.codes.to(device, non_blocking=non_blocking) is self.codes:
            return self
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors().items()}
        there = ExpertWeights(self.format, **moved)
        if there.is_prepared:
            _ = there.kernel_scale  # made now: not in a graph capture
        return there

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the format has, by the names of the attributes."""
        attributes = {"codes": self.codes, "scale": self.scale, "zero": self.zero, "global_scale": self.global_scale}
        return {name: tensor for name, tensor in attributes.items() if tensor is not None}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return ``tensors()``, and the number of the codes' layout as ``order``. Save it together with ``format``."""
        return {**self.tensors(), "order": torch.tensor(self.order, dtype=torch.int64, device="cpu")}

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or pickle: float8 as bytes, because torch can't pickle float8.

        It leaves out scales that are derived for this version's kernels: another version may read them differently.
        """
        kept: dict[str, Any] = {"format": self.format, "zero": None, "global_scale": None, "order": self.order}
        for name, tensor in self.tensors().items():
            kept[name] = tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        elements = _precision(kept["format"]).w
        codes, scale = kept["codes"], kept["scale"]
        if elements.name == "e4m3" and codes.dtype is torch.uint8:
            codes = codes.view(torch.float8_e4m3fn)
        if elements.scale is not None and elements.scale.name == "e4m3":
            scale = scale.view(torch.float8_e4m3fn)
        self.__init__(kept["format"], codes, scale, kept["zero"], kept["global_scale"])  # type: ignore[misc]
        self._check_order(kept["order"])
        if self.is_prepared:
            checked(self)

    def __getattr__(self, name: str) -> Any:
        """Raise InputError: these weights' tensors were released by ``prepare``."""
        if "_prepared" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise InputError(
            f"ExpertWeights: these {self.format} weights were prepared, and their tensors released: use what prepare() "
            "returned (w = w.prepare()), or its restore() for the checkpoint's layout"
        )

    def __repr__(self) -> str:
        if "_prepared" in self.__dict__:
            return f"ExpertWeights({self.format}, released by prepare())"
        E, N, K = self.shape
        prepared = ", prepared" if self.is_prepared else ""
        return f"ExpertWeights({self.format}, E={E}, N={N}, K={K}, device={str(self.device)!r}{prepared})"

    def _log_nan(self) -> None:
        """Log where NaN is among codes in the checkpoint's layout."""
        _log.warning(
            "pretuned: %s codes are %s: these weights stay in the checkpoint's layout. If experts that get tokens have "
            "it, mend the checkpoint",
            self.format,
            place_of_nan(self.codes),
        )

    def _check_order(self, number: int) -> None:
        """Raise InputError if the codes are not in the layout that a saved state declares."""
        if number != self.order:
            order = _orders().get(self.format)
            knows = "0" if order is None else f"0 or {order.number}"
            raise bad(
                "order",
                f"{number} with codes {described(self.codes)}",
                f"one that this version knows for {self.format}, {knows}, and codes of its shape",
            )

    def _values(self, expert: int) -> torch.Tensor:
        """w[expert] in float32."""
        from .codes import Quantised, values

        codes, scale = self.codes[expert], self.scale[expert]
        zero, outer = (None if tensor is None else tensor[expert] for tensor in (self.zero, self.global_scale))
        if self.is_prepared:
            order = _order_of(self)
            codes = order.stored(codes)
            if order.stored_scale is not None and _moved(order, self.scale):
                scale = order.stored_scale(scale)
            if order.stored_zero is not None and zero is not None:
                zero = order.stored_zero(zero)
        return values(self.format, Quantised(codes, scale, zero, outer))

    @property
    def _quantised(self) -> Quantised:
        from .codes import Quantised

        return Quantised(self.codes, self.scale, self.zero, self.global_scale)


class _NanError(Exception):
    """NaN was among codes that were prepared in place."""


def _is_any(flags: list[torch.Tensor]) -> bool:
    """True if any flag is not 0; waits for the device that computes the flags."""
    return bool(flags) and bool(torch.cat([flag.flatten() for flag in flags]).any())


def version_of(tensor: torch.Tensor) -> int | None:
    """torch's count of writes to a tensor; None for inference tensors, which have no count."""
    return None if tensor.is_inference() else tensor._version


def synchronize(tensor: torch.Tensor) -> None:
    """Wait until a new tensor is whole, so that any stream may read it; in a graph capture there is nothing to do."""
    if tensor.is_cuda and not is_captured(tensor):
        torch.cuda.synchronize(tensor.device)


def is_captured(tensor: torch.Tensor) -> bool:
    """True if a CUDA graph is being captured, so that work on this tensor is recorded and not run."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _moved(order: CodeOrder, scale: torch.Tensor) -> bool:
    """True if the scales of prepared codes are in the prepared layout too."""
    return order.prepared_scale is not None and scale.dim() == 5


def _orders() -> dict[str, CodeOrder]:
    from .prepared_layout import ORDERS  # here, as weights in the checkpoint's layout don't need it

    return ORDERS


def _order_of(weights: ExpertWeights) -> CodeOrder:
    """The layout that prepared codes of this format are in."""
    order = _orders().get(weights.format)
    if order is None:
        raise bad(
            "codes",
            f"{described(weights.codes)}, as of prepared codes",
            f"those of a checkpoint: {weights.format} has no prepared layout",
        )
    return order


def _precision(format: str) -> Precision:
    precision = PRECISIONS.get(format) if isinstance(format, str) else None
    if precision is None or not precision.quantised:
        formats = ", ".join(name for name, row in PRECISIONS.items() if row.quantised)
        raise bad("format", repr(format), f"one of {formats}")
    return precision


def int4_format(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> str:
    """The int4 format whose group size fits the shapes; the smallest one if a single group holds all of K."""
    for name, tensor in (("codes", codes), ("scale", scale)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            raise bad(name, described(tensor), "[E, N, K/2] uint8" if name == "codes" else "[E, N, ceil(K/group)]")
    K, groups = codes.shape[2] * 2, scale.shape[2]
    for group in _GROUPS:
        if -(-K // group) == groups:
            return f"int4_g{group}{'' if zero is None else '_zp'}"
    wanted = " or ".join(str(-(-K // group)) for group in reversed(_GROUPS))
    raise bad("scale", f"of shape {list(scale.shape)}", f"{wanted} groups for K={K}: of 128, 64 or 32")


def checked(weights: ExpertWeights) -> ExpertWeights:
    """The weights, if they can be used; InputError names the first tensor that is wrong."""
    precision = _precision(weights.format)
    elements, scale = precision.w, precision.w.scale
    if scale is None:
        raise AssertionError(f"{precision.name} has no scale")
    four = elements.bits == 4
    codes = weights.codes
    if isinstance(codes, torch.Tensor) and codes.dtype is torch.int32:
        _check_prepared(weights)
    else:
        codes = of_dtype("codes", codes, (torch.uint8 if four else torch.float8_e4m3fn,))
        shape = "[E, N, K/2]" if four else "[E, N, K]"
        if codes.dim() != 3 or not codes.numel():
            raise bad("codes", f"of shape {list(codes.shape)}", f"{shape}, E, N and K of at least 1")
    of_dtype("scale", weights.scale, _SCALE_DTYPES[scale.name])
    E, N, _ = weights.shape
    blocks = prepared = scale_shape(weights)
    if weights.is_prepared and scale.rows == 1 and scale.columns:
        groups = max(1, 64 // scale.columns)
        prepared = (E, N // 64, blocks[2] // groups, 64, groups)
    moved = weights.is_prepared and _moved(_order_of(weights), weights.scale)
    fit("scale", weights.scale, prepared if moved else blocks, codes)
    if scale.zero_bits:
        dtype = torch.int8 if weights.is_prepared else torch.uint8
        fit("zero", of_dtype("zero", weights.zero, (dtype,)), prepared, codes)
    if scale.outer is not None:
        fit("global_scale", of_dtype("global_scale", weights.global_scale, (torch.float32,)), (E,), codes)
    for name, tensor in weights.tensors().items():
        if not tensor.is_contiguous():
            raise bad(
                name, f"with strides {list(tensor.stride())}", "contiguous (it is never copied): pass .contiguous()"
            )
        setattr(weights, name, tensor.detach())
    if weights.codes.is_meta:
        return weights
    if not weights.is_prepared:
        _check_finite(weights)
    else:
        _check_numbers(weights, codes=True)
        _ = weights.kernel_scale  # made now: not in a graph capture
    return weights


def scale_shape(weights: ExpertWeights) -> tuple[int, ...]:
    """The shape of scales in the checkpoint's layout."""
    scale, (E, N, K) = weights.precision.w.scale, weights.shape
    if scale is None:
        raise AssertionError(f"{weights.format} has no scale")
    return (E, -(-N // scale.rows), -(-K // scale.columns)) if scale.columns else (E, N)


def _check_finite(weights: ExpertWeights) -> None:
    """Raise InputError for a scale that is NaN or infinite."""
    for name, factors in (("scale", weights.scale), ("global_scale", weights.global_scale)):
        if factors is not None:
            check_finite(name, factors)


def _check_numbers(weights: ExpertWeights, *, codes: bool) -> None:
    """Raise InputError for scales, zero points and, with ``codes``, codes that kernels for prepared weights can't read.

    The weights may be in either layout.
    """
    from .prepared_layout import zero_has_room

    order = _orders().get(weights.format)
    if order is None or weights.codes.is_meta:
        return
    _check_finite(weights)
    if not order.room(weights.scale):
        raise bad("scale", "too large for prepared codes", _MOST_SCALES)
    if not zero_has_room(weights.zero):
        raise bad("zero", "out of range for prepared codes", _ZEROS)
    if codes and _is_any(_nan_among(weights)):
        stored = map(order.stored, weights.codes) if weights.is_prepared else weights.codes
        raise bad("codes", place_of_nan(stored), _NUMBERS)


def _nan_among(weights: ExpertWeights) -> list[torch.Tensor]:
    """Tensors that are true if codes have NaN, which only e4m3 can have."""
    is_e4m3 = weights.precision.w.name == "e4m3" and not weights.codes.is_meta
    return [nan_among(weights.codes)] if is_e4m3 else []


def _check_prepared(weights: ExpertWeights) -> None:
    words = 2 if weights.precision.w.bits == 4 else 4
    shape = tuple(weights.codes.shape)
    order = _order_of(weights)
    if len(shape) != 6 or shape[3:] != (64, 4, words) or not weights.codes.numel():
        raise bad(
            "codes",
            described(weights.codes),
            f"int32 [E, N/64, K/64, 64, 4, {words}] of prepared weights, or those of a checkpoint",
        )
    if isinstance(weights.scale, torch.Tensor) and order.moves(weights.scale) and weights.scale.dim() == 3:
        raise bad(
            "scale",
            f"{described(weights.scale)}, in the checkpoint's layout",
            "that of the codes, which are prepared: use both from one source",
        )


def key_of(w: torch.Tensor | ExpertWeights) -> tuple[object, ...]:
    """The part of a plan's key that is from w: its address, and the format if it is quantised."""
    return (w.codes.data_ptr(), w.format) if isinstance(w, ExpertWeights) else (w.data_ptr(),)
