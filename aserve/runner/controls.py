"""What the runner keeps of rows whose logits are controlled: penalties, biases, allowed tokens and bad words.

Token counts, biases and recent tokens live on the device, where the device itself counts what it samples, so that a
step need not wait for the tokens of the one before. A step without such a row pays nothing, and an engine that never
sees one has none of the tables. Letters: kernels/ops.py and rows.py; Q controlled rows of a step.
"""

import math

import numpy as np
import torch
from torch import Tensor

from aserve.core.columns import NO_PENALTY, PENALTIES, PenaltyColumns
from aserve.core.ids import Row
from aserve.core.plan import RowControls, RowInit
from aserve.kernels.ops import PADDING_ID, BadWords, LogitControls
from aserve.runner.device import StepDevice
from aserve.runner.kv_store import zeros
from aserve.runner.rows import Ints


class ControlTable:
    """The controls of all rows. Used by the runner's thread alone, in launch order, inside `stepping`."""

    def __init__(self, num_rows: int, vocab_size: int, torch_device: torch.device, device: StepDevice) -> None:
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._torch_device = torch_device
        self._device = device
        self._controls: dict[Row, RowControls] = {}
        self._counts_RV: Tensor | None = None
        self._bias_RV: Tensor | None = None
        self._recent_RH: Tensor | None = None

    def set_up(self, inits: tuple[RowInit, ...]) -> None:
        """Rows begin anew, with the history that their controls bring."""
        for init in inits:
            self._controls.pop(init.row, None)
            if (controls := init.sampling.controls) is not None:
                self._controls[init.row] = controls
                self._set_counts(init.row, controls)
                self._set_bias(init.row, controls)
                self._set_recent(init.row, controls)

    def has(self, row: Row) -> bool:
        """Whether a row is controlled."""
        return row in self._controls

    def batch(self, rows_N: Ints, banned_NC: Ints) -> LogitControls | None:
        """The controls of sampled rows, None where none has any. Takes over what `banned_NC` bans in those that do."""
        if not self._controls:
            return None
        places = [n for n, row in enumerate(rows_N.tolist()) if row in self._controls]
        if not places:
            return None
        controls = [self._controls[Row(row)] for row in rows_N[places].tolist()]
        banned_QC = banned_NC[places]
        banned_NC[places] = PADDING_ID
        penalties_Q = zip(*(c.penalties for c in controls), strict=True)
        rows_Q, table_rows_Q, banned, words_WM, word_rows_W, *penalties = self._device.upload(
            [
                np.array(places, np.int64),
                rows_N[places],
                banned_QC,
                *_words(controls),
                *(np.array(values_Q, column.dtype) for values_Q, column in zip(penalties_Q, PENALTIES, strict=True)),
            ]
        )
        bad_words = None
        if len(words_WM) and self._recent_RH is not None:
            bad_words = BadWords(words_WM, word_rows_W, self._recent_RH)
        return LogitControls(
            rows_Q=rows_Q,
            table_rows_Q=table_rows_Q,
            bias_RV=self._bias_RV,
            counts_RV=self._counts_RV,
            penalties_Q=PenaltyColumns(*penalties),
            banned_QC=banned if banned_QC.size else None,
            bad_words=bad_words,
        )

    def _set_counts(self, row: Row, controls: RowControls) -> None:
        if controls.penalties == NO_PENALTY and self._counts_RV is None:
            return
        if self._counts_RV is None:
            self._counts_RV = zeros((self._num_rows, self._vocab_size), torch.int32, self._torch_device)
        generated, times = np.unique(np.array(controls.output_ids, np.int64), return_counts=True)
        prompt = np.unique(np.array(controls.prompt_ids, np.int64))
        prompt_ids, output_ids, twice = self._device.upload([prompt, generated, 2 * times.astype(np.int32)])
        counts_V = self._counts_RV[row].zero_()
        counts_V.index_fill_(0, prompt_ids, 1)
        counts_V.index_add_(0, output_ids, twice)

    def _set_bias(self, row: Row, controls: RowControls) -> None:
        has_bias = bool(controls.logit_bias or controls.allowed_ids)
        if not has_bias and self._bias_RV is None:
            return
        if self._bias_RV is None:
            self._bias_RV = zeros((self._num_rows, self._vocab_size), torch.float32, self._torch_device)
        biased = dict(controls.logit_bias)
        biased_ids, biases, allowed_ids = self._device.upload(
            [
                np.array(list(biased), np.int64),
                np.array(list(biased.values()), np.float32),
                np.array(controls.allowed_ids, np.int64),
            ]
        )
        bias_V = self._bias_RV[row].fill_(-math.inf if controls.allowed_ids else 0.0)
        bias_V.index_fill_(0, allowed_ids, 0.0)
        bias_V.index_add_(0, biased_ids, biases)

    def _set_recent(self, row: Row, controls: RowControls) -> None:
        num_needed = max((len(word) - 1 for word in controls.bad_words), default=-1)
        if num_needed < 0 and self._recent_RH is None:
            return
        recent_RH = self._widen_recent(max(num_needed, 1))
        width = recent_RH.shape[1]
        newest = list(controls.output_ids[-width:])
        [recent_H] = self._device.upload([np.array([PADDING_ID] * (width - len(newest)) + newest, np.int64)])
        recent_RH[row].copy_(recent_H)

    def _widen_recent(self, width: int) -> Tensor:
        """The table of recent tokens, at least so wide. Tokens that it never kept, no row's words ask for."""
        kept_RH = self._recent_RH
        if kept_RH is None:
            kept_RH = torch.empty((self._num_rows, 0), dtype=torch.int64, device=self._torch_device)
        if kept_RH.shape[1] < width:
            pad = (self._num_rows, width - kept_RH.shape[1])
            kept_RH = torch.cat((kept_RH.new_full(pad, PADDING_ID), kept_RH), dim=1)
        self._recent_RH = kept_RH
        return kept_RH


def record_sampled(controls: LogitControls, ids_N: Tensor) -> None:
    """Add what a step sampled, [N], to the tables of the rows that have controls; on the device."""
    ids_Q = ids_N.index_select(0, controls.rows_Q)
    if (counts_RV := controls.counts_RV) is not None:
        twos_Q = torch.full_like(ids_Q, 2, dtype=torch.int32)
        counts_RV.view(-1).index_add_(0, ids_Q + controls.table_rows_Q * counts_RV.shape[1], twos_Q)
    if (words := controls.bad_words) is not None:
        recent_QH = words.recent_RH.index_select(0, controls.table_rows_Q)
        newest_QH = torch.cat((recent_QH[:, 1:], ids_Q[:, None]), dim=1)
        words.recent_RH.index_copy_(0, controls.table_rows_Q, newest_QH)


def _words(controls: list[RowControls]) -> tuple[Ints, Ints]:
    """All bad words, [W, M], padded in front, and whose they are, [W]."""
    owned = [(q, word) for q, c in enumerate(controls) for word in c.bad_words]
    longest = max((len(word) for _, word in owned), default=0)
    words_WM = np.full((len(owned), longest), PADDING_ID, np.int64)
    for w, (_, word) in enumerate(owned):
        words_WM[w, longest - len(word) :] = word
    return words_WM, np.array([q for q, _ in owned], np.int64)
