# SPDX-License-Identifier: Apache-2.0
"""Comparing a source with the published state: bits, on threads or on the device where the weights lie."""
