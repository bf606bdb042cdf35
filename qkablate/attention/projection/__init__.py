"""Circuits put into another form: conversion, projection, assignment of heads."""
