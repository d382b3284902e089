# SPDX-License-Identifier: Apache-2.0
"""Measurements: two things side by side in one run, as ratios, with method and spread. No tests live here."""
