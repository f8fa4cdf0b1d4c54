"""Empty: SGLang 0.5.19 imports torchaudio for models that the tests do not run."""
