"""The command line: ``gradcomp bench`` measures hooks on the link that it is launched on."""
