"""An HTTP server for one bundle, compatible with OpenAI's API, and a chat page.

    from eagle_runtime import EagleModel
    from eagle_serve.server import serving
    with EagleModel.load("bundle/") as model, serving(model, "bundle/") as address: ...

Read app.py first: it lists the endpoints.
"""

from eagle_serve.options import Limits, Options

__all__ = ["Limits", "Options"]
