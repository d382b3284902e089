# SPDX-License-Identifier: Apache-2.0
"""What ``delta-snapshot`` takes: one module a group of verbs, with their options and help; no work is done here.

What a verb does lies in a module of its name in `vllm_delta_snapshot.cli`, imported when the verb is called: ``--help``
has to be there at once, so that nothing heavy (numpy, pydantic, boto3, torch) may be imported by these modules.
"""
