# SPDX-License-Identifier: Apache-2.0
"""Making a version of what changed: in turns, behind the step, all or nothing; telling of it; the way back."""
