"""Automatic prefix caching for language-model serving: compute every shared prompt prefix once."""
