"""The engine: scheduler, runner, sampler, and the loops around them.

Nothing is imported here: ``engine.scheduler`` serves replays too, which must not load torch.
"""
