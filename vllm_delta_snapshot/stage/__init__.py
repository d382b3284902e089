# SPDX-License-Identifier: Apache-2.0
"""Everything that can be done while generation goes on: fetch, verify, decode, merge, hand over."""
