"""What the pages ask for, over HTTP: JSON, and events of the server.

Every answer is an ``Answer``. Names of folders, texts of recipes and messages of errors come from
files that anybody may have written; one that is no Unicode must not take all runs with it.
"""

from typing import Annotated

from pydantic import PlainSerializer

from ...terminal_text import plain

Answer = Annotated[dict[str, object], PlainSerializer(plain)]
