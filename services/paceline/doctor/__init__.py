"""Examines a deployment from outside, and says what is wrong with it and what to do: `paceline doctor`.

Light, like the client: no torch, no Ray, no engine.
"""
