"""`weightlane demo`: a small model learns by reward while a lane carries its weights to a rollout engine."""
