# SPDX-License-Identifier: Apache-2.0
"""The pictures of a run, drawn by matplotlib (extra ``[plot]``). Import this package only where it may be missing."""

from vllm_delta_snapshot.report.figures.gallery import Picture, draw_pictures
from vllm_delta_snapshot.report.figures.style import DARK, LIGHT, Theme, picture_bytes

__all__ = ["DARK", "LIGHT", "Picture", "Theme", "draw_pictures", "picture_bytes"]
