"""Validation of proposals and of the units of plans, by proposers and by the placer alike (LAW 1).

A plan's way in the placer: `core/decide`, `core/plans/proposals`; here `plan_stops`, `validate_plans`; then
`scheduling/groups/validate_groups`, `scheduling/make_room/succession`, `cluster/view`, `cluster/assignment`.
"""
