import sys
from pathlib import Path

import setuptools

sys.path.insert(0, str(Path(__file__).resolve().parent / "ci"))

# Without build isolation it is up to the user to have the build requirements.
REQUIREMENTS = "setuptools>=77 pybind11>=2.12 ninja>=1.11"
try:
    if int(setuptools.__version__.split(".")[0]) < 77:
        raise ImportError(f"setuptools is {setuptools.__version__}")
    from hisparse_build.extension import BuildExtension
except ImportError as error:
    sys.exit(f"error: {error}; building hisparse needs {REQUIREMENTS}: pip install them, or build with isolation")

setuptools.setup(
    ext_modules=[setuptools.Extension("hisparse._C", sources=[])],
    cmdclass={"build_ext": BuildExtension},
)
