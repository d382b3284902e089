# SPDX-License-Identifier: Apache-2.0
"""What a run looks like: its history in numbers (`history`, `touched`), as tables, pictures (`figures`) and a page.

Reads a run and writes nothing into it. Only `figures` needs matplotlib (extra ``[plot]``).
"""
