"""The fake W&B server with saved views."""

import json
from typing import Any

from tests.tracking.wandb.fake_server import FakeServer


class ViewServer(FakeServer):
    """A stand-in for W&B's server that stores saved views.

    `views` holds them by name; `refused` names an operation that is answered with an error.
    """

    def __init__(self, refuses: str = "", **ways: Any) -> None:
        super().__init__(**ways)
        self.views: dict[str, dict[str, Any]] = {}
        self.refuses = refuses
        self.operations: list[str] = []

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if self.refuses and self.refuses in body.decode(errors="replace"):
            return {"data": None, "errors": [{"message": f"{self.refuses} is not allowed"}]}
        return super().answer(path, body)

    def _graphql(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        self.operations.append(operation)
        if operation == "UpsertView2":
            return self._upsert(given)
        if operation == "View":
            view = self.views.get(given["viewName"])
            return {"project": {"allViews": {"edges": [{"node": view}] if view else []}}}
        if operation == "GetDefaultEntity":
            return {"viewer": {"id": "1", "entity": "somebody"}}
        return super()._graphql(operation, given)

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        known = given["name"] in self.views
        json.loads(given["spec"])
        self.views[given["name"]] = {"id": f"id-of-{given['name']}", **given}
        view = {"id": f"id-of-{given['name']}", "name": given["name"]}
        return {"upsertView": {"view": view, "inserted": not known}}
