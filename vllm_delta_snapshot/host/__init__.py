# SPDX-License-Identifier: Apache-2.0
"""The stager: one process a host that does all that can be done while generation goes on, and hands over by files."""
