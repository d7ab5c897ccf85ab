"""Every private name of torch that capture uses, with the versions that have it; fakes and sizes. May import hook."""
