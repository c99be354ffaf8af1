"""The build of the native extension: what setup.py, the scripts in ci/ and the tests share."""
