# SPDX-License-Identifier: Apache-2.0
"""What proves a run (`verify_run`, `verify_deep`), and what compares its versions, or checkpoints, with each other."""
