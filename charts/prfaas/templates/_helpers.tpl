{{/* Labels that select the operator's pods; they never change, because a Deployment's selector cannot. */}}
{{- define "prfaas.selectorLabels" -}}
app.kubernetes.io/name: prfaas
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{/* Labels of every object of this chart. */}}
{{- define "prfaas.labels" -}}
{{ include "prfaas.selectorLabels" . }}
app.kubernetes.io/part-of: prfaas
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The operator's image, by digest where one is given. */}}
{{- define "prfaas.image" -}}
{{- with .Values.operator.image }}
{{- if .digest }}{{ printf "%s@%s" .repository .digest }}{{ else }}{{ printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) }}{{ end }}
{{- end }}
{{- end }}

{{/* The image that a value names, or else one of the same registry and version as the operator's: whoever named that one
     owns this one, too. Where that one has another name than `operator`, or a digest, nobody can tell which one belongs
     to it. */}}
{{- define "prfaas.imageOf" -}}
{{- $root := index . 0 }}
{{- with index $root.Values (index . 2) }}
{{- . }}
{{- else }}
{{- with $root.Values.operator.image }}
{{- if or .digest (ne (base .repository) "operator") }}
{{- fail (printf "%s: the operator's image %s is not REGISTRY/operator:TAG, so it does not tell where this image is; set it to NAME:TAG or NAME@DIGEST" (index $ 2) (include "prfaas.image" $root)) }}
{{- end }}
{{- printf "%s%s:%s" (trimSuffix "operator" .repository) (index $ 1) (.tag | default $root.Chart.AppVersion) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What makes a pod pass the restricted Pod Security Standard. */}}
{{- define "prfaas.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "prfaas.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Egress rule for names. */}}
{{- define "prfaas.egressDns" -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}
