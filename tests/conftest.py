from hypothesis import settings

# The first call of a numpy or torch function can take longer than hypothesis allows an example; how long is not what is tested.
settings.register_profile("gradcomp", deadline=None)
settings.load_profile("gradcomp")
